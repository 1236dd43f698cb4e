"""Sharding rules of operators, one file for each family of operators."""
