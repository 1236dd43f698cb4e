"""Our layers in a captured graph: replacements of their functions, with operators and rules of their own."""
