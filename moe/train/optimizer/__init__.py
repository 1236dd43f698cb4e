"""Optimizers and learning rate schedules, independent of the layout."""
