"""Layouts compared with one process, on gloo ranks that end with the last of these tests."""
