"""Parts of the terminal view that depend on the kind of model."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from service.wire.uses import GENERATE, TRANSLATE

if TYPE_CHECKING:
    from service.cli.view.report import ReportView
    from service.client import Job


@dataclass(frozen=True)
class Words:
    """Phrases for a kind of model."""

    last_work: str
    """Description of the work after the last step."""
    to_use_it: str
    """Command that uses the trained model; `{job}` is the job's id."""
    command: str | None = None
    """Name of the command, if it takes a job and a text."""


def words_of(job: "Job") -> Words:
    match _kind(job):
        case "translation":
            return Words(
                "translating the held-out sets for evaluation",
                "'shardyard translate {job} TEXT' translates with its last checkpoint",
                TRANSLATE,
            )
        case "language" if _corpus(job) in ("chat", "preference", "unpaired_preference"):
            return Words(
                "evaluating held-out conversations",
                "'shardyard generate {job} --chat TEXT' answers with its last checkpoint",
                GENERATE,
            )
        case "language":
            return Words(
                "evaluating held-out text and continuing some of it",
                "'shardyard generate {job} PROMPT' continues a text with its last checkpoint",
                GENERATE,
            )
        case "module":
            return Words(
                "computing the loss of one more batch", "'shardyard download {job}' fetches its last checkpoint"
            )
        case _:
            return Words("evaluating", "'shardyard download {job}' fetches its last checkpoint")


def _kind(job: "Job") -> str:
    model = (job.data.get("spec") or {}).get("model") or {}
    kind: str = model.get("kind", "translation")  # not written by older releases
    return kind


def _corpus(job: "Job") -> str | None:
    data = (job.data.get("spec") or {}).get("data") or {}
    corpus: str | None = data.get("corpus")
    return corpus


def report_view(job: "Job") -> "ReportView | None":
    """View of a job's report, imported on demand; None if there is none that this release can show."""
    if job.report is None:
        return None
    match _kind(job):
        case "translation":
            from service.cli.view.translation import TranslationView

            return TranslationView.from_data(job.report)
        case "language":
            from service.cli.view.language import LanguageView

            return LanguageView.from_data(job.report)
        case "module":
            from service.cli.view.module import ModuleView

            return ModuleView.from_data(job.report)
        case _:
            return None
