"""What the random numbers of a program depend on beside their place in it."""

from dataclasses import dataclass


@dataclass
class Draws:
    """Seed and step of the numbers that programs draw; whoever runs them sets it before each step."""

    seed: int = 0
    step: int = 0
