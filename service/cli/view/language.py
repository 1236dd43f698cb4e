"""Report of a language model's run: held-out losses compared with baselines, and completions."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moe.records import LanguageReport, SourceReport
from moe.records.language import ALL
from service.cli.view.amounts import num_bytes
from service.cli.view.printable import printable, printable_lines
from service.cli.view.report import ReportView

FALLBACK_PROMPT = "def "
MAX_PROMPT_CHARS = 60

_FIGURES: tuple[tuple[str, str, Callable[[SourceReport], float | None]], ...] = (
    ("base", ".3f", lambda source: source.base_loss),
    ("loss", ".3f", lambda source: source.loss),
    ("preferred", ".1%", lambda source: source.preferred),
    ("desirable", ".3f", lambda source: source.desirable_reward),
    ("undesirable", ".3f", lambda source: source.undesirable_reward),
    ("margin", ".3f", lambda source: source.reward_margin),
    ("KL", ".3f", lambda source: source.kl),
    ("perplexity", ",.1f", lambda source: source.perplexity),
    ("bits/byte", ".3f", lambda source: source.bits_per_byte),
    ("unigram", ".3f", lambda source: source.unigram_bits_per_byte),
    ("xz", ".3f", lambda source: source.xz_bits_per_byte),
)

_LEGEND = (
    "loss: nats per token; base: the base model without its adapter. bits/byte: the "
    "model's, then those of the training\ntokens' frequencies (unigram) and of xz, which "
    "compresses each document separately."
)
_LEGEND_OF_PAIRS = (
    "loss: preference loss (0.693 if neither answer has gained). preferred: pairs whose "
    "preferred answer has gained\nmore than the other."
)
_LEGEND_OF_LABELS = (
    "loss: preference loss (0.5 before the first step). desirable, undesirable: mean rewards of answers by label, "
    "and their\nmargin. KL: estimated divergence from the reference model."
)


@dataclass(frozen=True)
class LanguageView(ReportView):
    """A language report on the terminal."""

    report: LanguageReport
    examples_are = "completions"

    @classmethod
    def from_data(cls, data: object) -> "LanguageView | None":
        """View of a JSON report; None for another kind."""
        report = LanguageReport.read(data)
        return cls(report) if report.sources else None

    def scores(self) -> RenderableType:
        """Loss, perplexity and bits per byte of each source, compared with a unigram model and xz."""
        return Group(
            Text("held-out text, by source", "bold"), _table(self.report.sources), Text(""), Text(self._legend, "dim")
        )

    @property
    def _legend(self) -> str:
        sources = self.report.sources.values()
        if any(source.preferred is not None for source in sources):
            return _LEGEND_OF_PAIRS
        rewards = [reward for source in sources for reward in (source.desirable_reward, source.undesirable_reward)]
        return _LEGEND if all(reward is None for reward in rewards) else _LEGEND_OF_LABELS

    def examples(self) -> RenderableType | None:
        """Prompts from held-out documents, each followed by the model's completion in bold."""
        parts: list[RenderableType] = []
        for sample in self.report.completions:
            parts.append(Text(printable(sample.source), "dim"))
            prompt, completion = printable_lines(sample.prompt), printable_lines(sample.completion)
            parts += [Text.assemble((prompt, ""), (completion, "bold")), Text("")]
        return Group(*parts) if parts else None

    def text_to_try(self) -> str:
        """First line of a held-out document."""
        for sample in self.report.completions:
            for line in sample.prompt.splitlines():
                if prompt := printable(line)[:MAX_PROMPT_CHARS]:
                    return prompt
        return FALLBACK_PROMPT


def _table(sources: dict[str, SourceReport]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("", overflow="ellipsis", max_width=30)
    for label in ("documents", "size"):
        table.add_column(label, justify="right", no_wrap=True)
    figures_of = [figure for figure in _FIGURES if any(figure[2](source) is not None for source in sources.values())]
    for label, _, _ in figures_of:
        style = "bold green" if label == "bits/byte" else ""
        table.add_column(label, justify="right", no_wrap=True, style=style)
    for name, source in sources.items():
        label = "all sources" if name == ALL else printable(name)
        figures = [_format_value(value(source), form) for _, form, value in figures_of]
        table.add_row(label, f"{source.num_documents:,}", num_bytes(source.num_bytes), *figures)
    return table


def _format_value(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
