"""Generation of text by the models of jobs."""
