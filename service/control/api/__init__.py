"""HTTP: routes parse, call, and return. What is allowed at all is decided in `guard`."""
