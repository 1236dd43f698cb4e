"""Rules of operators, a file a family."""
