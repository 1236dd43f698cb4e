"""Terminal view of a finished run's report, for any kind of model."""

from abc import ABC, abstractmethod

from rich.console import RenderableType


class ReportView(ABC):
    """Terminal view of a report."""

    examples_are: str
    """Heading of the examples."""

    @abstractmethod
    def scores(self) -> RenderableType:
        """Evaluation of the model."""

    @abstractmethod
    def examples(self) -> RenderableType | None:
        """Inputs with the model's outputs; None if there are none."""

    @abstractmethod
    def text_to_try(self) -> str:
        """A text on which the model may do well."""
