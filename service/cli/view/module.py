"""Report of a run of a user's module."""

from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from moe.records import ModuleReport
from service.cli.view.printable import printable
from service.cli.view.report import ReportView


@dataclass(frozen=True)
class ModuleView(ReportView):
    """Terminal view of a module's report."""

    report: ModuleReport
    examples_are = ""

    @classmethod
    def from_data(cls, data: object) -> "ModuleView | None":
        """View of a JSON report; None if it is not a module's."""
        report = ModuleReport.read(data)
        return None if report.loss is None else cls(report)

    def scores(self) -> RenderableType:
        """Loss and the module's own numbers on the batch after the last."""
        text = f"loss {self.report.loss:.4g} of the batch after {self.report.num_steps:,} steps"
        numbers = (self.report.numbers or {}).items()
        number_texts = (f"{printable(name)} {'-' if number is None else f'{number:.4g}'}" for name, number in numbers)
        return Text("\n".join((text, *number_texts)))

    def examples(self) -> None:
        """None, since the meaning of a module's outputs is unknown."""

    def text_to_try(self) -> str:
        return ""
