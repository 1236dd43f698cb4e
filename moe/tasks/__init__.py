"""Tasks: the kinds of models that can be trained, one package each."""
