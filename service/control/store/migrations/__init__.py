"""Steps that make each release's tables from those of the release before."""
