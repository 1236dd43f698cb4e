"""Generation by a trained model in a separate process, which loads torch; this process never does."""
