"""A file a family of commands. Nothing heavy is imported before a command runs."""
