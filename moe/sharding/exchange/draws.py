"""What the random numbers of a program depend on beside their place in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Draws:
    """Seed and step of the numbers that programs draw; whoever runs them sets it before each step."""

    seed: int = 0
    step: int = 0

    @contextmanager
    def being(self, source: "Draws") -> Iterator[None]:
        """Draw what others drew: a backward pass draws again what its forward pass drew, whatever ran between."""
        now = self.seed, self.step
        self.seed, self.step = source.seed, source.step
        try:
            yield
        finally:
            self.seed, self.step = now
