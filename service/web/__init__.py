"""The pages: a client of the public API, rendered on the server."""
