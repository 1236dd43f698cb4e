"""Files anywhere that fsspec reaches, and what is opened beneath a folder and nowhere else."""
