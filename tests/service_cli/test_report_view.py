"""The report of a run on the terminal: the scores that it holds, and nothing for a report of another task."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from moe.records import Completion, LanguageReport, ModuleReport, SourceReport, TranslationReport
from service.cli.view.language import LanguageView
from service.cli.view.module import ModuleView
from service.cli.view.translation import TranslationView

KEPT = Path(__file__).parents[1] / "golden" / "records" / "report.json"


def printed(shown: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(shown)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


@pytest.fixture(scope="module")
def report() -> TranslationReport:
    return TranslationReport.read(json.loads(KEPT.read_text()))


def test_scores_stand_beside_what_needs_no_learning(report: TranslationReport) -> None:
    text = printed(TranslationView(report).scores())
    assert "loss 5.21 nats per token, -1.82 below a unigram model's 3.39" in text
    lines = text.splitlines()
    head, everything = (next(line for line in lines if mark in line) for mark in ("chrF", "all languages"))
    assert head.split() == ["pairs", "langs", "chrF", "copy", "freq", "BLEU", "copy", "freq"]
    assert everything.split()[2:] == ["6", "4", "9.1", "3.0", "21.0", "0.0", "2.2", "0.0"]


def test_examples_are_shown_with_source_reference_and_translation(report: TranslationReport) -> None:
    text = printed(TranslationView(report).examples())
    for example in report.examples:
        assert f"{example.lang}  {example.script}, {example.set}" in text
        assert f"source       {example.source}" in text
        assert f"reference    {example.reference}" in text


@pytest.mark.parametrize("told", [None, {}, {"steps": 5}, {"perplexity": 3.5, "sets": ["validation"]}])
def test_a_report_of_another_task_has_no_sets(told: object) -> None:
    assert TranslationView.from_data(told) is None


LANGUAGE = LanguageReport(
    sources={
        "django": SourceReport(12, 3400, 14_200, 2.5, 12.18, 0.8631, 2.12, 1.73),
        "empty": SourceReport(0, 0, 0, None, None, None, None, None),
        "all": SourceReport(12, 3400, 14_200, 2.5, 12.18, 0.8631, 2.12, 1.73),
    },
    completions=(Completion("django", "\nclass Field:\n    def ", "clean(self):\x1b[2J\n        pass"),),
)


def test_held_out_text_stands_beside_what_needs_no_learning() -> None:
    lines = [line.split() for line in printed(LanguageView(LANGUAGE).scores()).splitlines()]
    assert ["documents", "size", "loss", "perplexity", "bits/byte", "unigram", "xz"] in lines
    assert ["django", "12", "14", "KiB", "2.500", "12.2", "0.863", "2.120", "1.730"] in lines
    assert ["empty", "0", "0", "B", *["-"] * 5] in lines
    assert ["all", "sources", *lines[2][1:]] in lines


def test_completions_follow_their_prompts_and_move_no_cursor() -> None:
    view = LanguageView(LANGUAGE)
    text = printed(view.examples())
    assert "class Field:\n    def clean(self): [2J\n        pass" in text
    assert view.text_to_try() == "class Field:"


def test_a_report_without_sources_is_not_one_of_language() -> None:
    assert LanguageView.from_data(LANGUAGE.to_plain()) == LanguageView(LANGUAGE)
    for told in (None, {}, {"sets": {}}):
        assert LanguageView.from_data(told) is None


def test_a_modules_own_numbers_stand_below_its_loss() -> None:
    report = ModuleReport(9, 0.25, {"accuracy": 0.5, "perplexity\x1b[2J": None})
    view = ModuleView.from_data(json.loads(json.dumps(report.to_plain())))
    assert view == ModuleView(report)
    assert printed(view.scores()).splitlines() == [
        "loss 0.25 of the batch after 9 steps", "accuracy 0.5", "perplexity [2J -",
    ]  # fmt: skip
