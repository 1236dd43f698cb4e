"""Capture: a module as one graph of torch's operators, or a refusal that names the user's line."""
