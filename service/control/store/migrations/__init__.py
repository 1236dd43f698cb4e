"""How each release's tables are made from the release before."""
