"""Report of a translation run: scores compared with baselines, and example translations."""

from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moe.records import SetReport, SubsetReport, TranslationReport
from service.cli.view.printable import printable
from service.cli.view.report import ReportView

SETS = {
    "unseen": "unseen English: the English message occurs in training in no language",
    "seen": "seen English: the English message occurs in training, in other languages",
}
SUBSETS = {
    "all": "all languages",
    "not_latin": "not in Latin script",
    "high": "high-resource",
    "mid": "mid-resource",
    "low": "low-resource",
}


FALLBACK_TEXT = "Bonjour"


@dataclass(frozen=True)
class TranslationView(ReportView):
    """Terminal view of a translation report."""

    report: TranslationReport
    examples_are = "translations"

    @classmethod
    def from_data(cls, data: object) -> "TranslationView | None":
        """View of a JSON report; None for another kind."""
        report = TranslationReport.read(data)
        return cls(report) if report.sets else None

    def scores(self) -> RenderableType:
        """Loss, chrF and BLEU of both held-out sets, compared with two baselines."""
        parts: list[RenderableType] = []
        for name, set_report in self.report.sets.items():
            parts += [*_heading(name, set_report), _table(set_report.subsets), Text("")]
        most_frequent = printable(self.report.most_frequent_target)
        parts.append(
            Text(
                "copy: the source as its translation. freq: the most frequent target, "
                f"{most_frequent!r}, for every source.\nLanguages are high-, mid- and low-resource by "
                "thirds of their pairs in training.",
                "dim",
            )
        )
        return Group(*parts)

    def examples(self) -> RenderableType:
        """Source, reference and translation, each on its own line: right-to-left text would break a table."""
        parts: list[RenderableType] = []
        for example in self.report.examples:
            parts.append(Text.assemble((example.lang, "bold"), (f"  {example.script}, {example.set}", "dim")))
            grid = Table.grid(padding=(0, 2, 0, 0))
            grid.add_column(style="dim", no_wrap=True)
            grid.add_column(overflow="fold")
            for side in ("source", "reference", "translation"):
                text = printable(getattr(example, side))
                grid.add_row(f"  {side}", Text(text, "bold" if side == "translation" else ""))
            parts.append(grid)
        return Group(*parts)

    def text_to_try(self) -> str:
        """Source of an example, if possible one translated exactly as its reference."""
        examples = sorted(self.report.examples, key=lambda example: example.translation != example.reference)
        return next((printable(example.source) for example in examples), FALLBACK_TEXT)


def _heading(name: str, report: SetReport) -> list[Text]:
    loss, unigram = report.loss, report.unigram_loss
    if loss is None or unigram is None:
        return [Text(SETS.get(name, name), "bold"), Text("no held-out pairs")]
    lines = [
        Text(SETS.get(name, name), "bold"),
        Text.assemble(
            "loss ",
            (f"{loss:.2f}", "bold"),
            f" nats per token, {unigram - loss:.2f} below a unigram model's {unigram:.2f}",
        ),
    ]
    if alike := report.num_with_text_in_training:
        lines.append(Text(f"of these, {alike:,} pairs occur verbatim in training under a sibling locale", "dim"))
    return lines


def _table(subsets: dict[str, SubsetReport]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True, min_width=19)
    table.add_column("pairs", justify="right", no_wrap=True)
    table.add_column("langs", justify="right", no_wrap=True)
    for metric in ("chrF", "BLEU"):
        for label, style in ((metric, "bold green"), ("copy", ""), ("freq", "")):
            table.add_column(label, justify="right", no_wrap=True, style=style, min_width=5)
    for key, label in SUBSETS.items():
        if (subset := subsets.get(key)) is None:
            continue
        systems = (subset.model, subset.copy, subset.most_frequent)
        cells = [_score(system.chrf) for system in systems] + [_score(system.bleu) for system in systems]
        table.add_row(label, f"{subset.num_pairs:,}", f"{subset.num_languages:,}", *cells)
    return table


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
