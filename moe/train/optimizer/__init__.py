"""Optimizers and their schedules, of which no layout changes anything."""
