"""A user's own module as a kind of model: its code is called where the operator allows it, and nowhere else."""
