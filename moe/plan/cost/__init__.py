"""Costs of a layout: bytes and seconds, predicted."""
