"""Connections: how many there may be, how long they may take, and what they can make this service say in its log."""
