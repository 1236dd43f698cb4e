"""Generation by a trained model in a process of its own, which loads torch; this one never does."""
