"""The report of a finished run on the terminal, whatever its model is."""

from abc import ABC, abstractmethod

from rich.console import RenderableType


class ReportView(ABC):
    """What the terminal shows of a report."""

    examples_are: str
    """What the examples are, in a word."""

    @abstractmethod
    def scores(self) -> RenderableType:
        """What was measured of the model."""

    @abstractmethod
    def examples(self) -> RenderableType:
        """Texts and what the model gives for them."""

    @abstractmethod
    def text_to_try(self) -> str:
        """A text that the model may do well on."""
