"""HTTP routes: they parse, call services, and return. `guard` decides what is allowed in."""
