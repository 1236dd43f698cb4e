"""The report of a run of a user's module."""

from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from moe.records import ModuleReport
from service.cli.view.printable import printable
from service.cli.view.report import ReportView


@dataclass(frozen=True)
class ModuleView(ReportView):
    """A module's report on the terminal."""

    report: ModuleReport
    examples_are = ""

    @classmethod
    def from_data(cls, data: object) -> "ModuleView | None":
        """The view of a report as JSON; None where it is not one of a module."""
        report = ModuleReport.read(data)
        return None if report.loss is None else cls(report)

    def scores(self) -> RenderableType:
        """The loss of the batch after the last, and the module's own numbers of it."""
        text = f"loss {self.report.loss:.4g} of the batch after its {self.report.num_steps:,} steps"
        numbers = (self.report.numbers or {}).items()
        number_texts = (
            f"{printable(name)} {'-' if number is None else f'{number:.4g}'}" for name, number in numbers
        )
        return Text("\n".join((text, *number_texts)))

    def examples(self) -> None:
        """None: a module says nothing of what its outputs mean."""

    def text_to_try(self) -> str:
        return ""
