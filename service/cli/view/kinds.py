"""Parts of the terminal's view that differ by kind of model."""

from typing import TYPE_CHECKING

from service.cli.view.report import ReportView
from service.cli.view.translation import TranslationView

if TYPE_CHECKING:
    from service.client import Job


def report_view(job: "Job") -> ReportView | None:
    """The view of a job's report; None where it has none that this release can show."""
    model = (job.data.get("spec") or {}).get("model") or {}
    match model.get("kind", "translation"):  # which an older release did not write
        case "translation":
            return TranslationView.of(job.report)
        case _:
            return None
