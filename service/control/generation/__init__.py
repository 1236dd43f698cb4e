"""Text generation by jobs' models."""
