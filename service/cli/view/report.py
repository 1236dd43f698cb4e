"""The report of a finished run on the terminal, whatever its model is."""

from abc import ABC, abstractmethod

from rich.console import RenderableType


class ReportView(ABC):
    """A report as the terminal shows it."""

    examples_are: str
    """Name of the examples, in a word."""

    @abstractmethod
    def scores(self) -> RenderableType:
        """Measurements of the model."""

    @abstractmethod
    def examples(self) -> RenderableType | None:
        """Texts and what the model gives for them; None where there are none."""

    @abstractmethod
    def text_to_try(self) -> str:
        """A text that the model may do well on."""
