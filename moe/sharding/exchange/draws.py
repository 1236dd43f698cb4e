"""Seed and step of a program's random numbers, which also depend on their position in the program."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Draws:
    """Seed and step of the random numbers that programs draw. The caller of a program sets the step."""

    seed: int = 0
    step: int = 0

    @contextmanager
    def set_to(self, source: "Draws") -> Iterator[None]:
        """Context with another seed and step: a backward pass draws the same numbers as its forward pass, whatever ran
        in between."""
        now = self.seed, self.step
        self.seed, self.step = source.seed, source.step
        try:
            yield
        finally:
            self.seed, self.step = now
