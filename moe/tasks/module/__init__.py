"""User modules as a task; their code is called only where the operator allows it."""
