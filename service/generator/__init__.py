"""Generation by a trained model in a separate process, which loads torch."""
