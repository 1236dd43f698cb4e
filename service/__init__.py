"""The service: `cli` and `client` for users, `control` for the control plane's process, `run` for processes on the
cluster, `wire` for messages between them, and `head` for a local Ray cluster."""
