"""Jobs on the terminal: reports, what each rank does, words by kind of model, commands to type next."""

import io
import json
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console, RenderableType

from moe.records import Completion, LanguageReport, ModuleReport, SourceReport, StepRecord, TranslationReport
from service.cli.options import program
from service.cli.view.frame import figures
from service.cli.view.kinds import words_of
from service.cli.view.language import LanguageView
from service.cli.view.module import ModuleView
from service.cli.view.progress import RunProgress
from service.cli.view.ranks import MAX_SHOWN, describe_ranks, gpu_use, rank_rows
from service.cli.view.translation import TranslationView
from service.client.job import Job

REPORT_FILE = Path(__file__).parents[1] / "golden" / "records" / "report.json"


def render(renderable: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


@pytest.fixture(scope="module")
def report() -> TranslationReport:
    return TranslationReport.read(json.loads(REPORT_FILE.read_text()))


def test_scores_stand_beside_what_needs_no_learning(report: TranslationReport) -> None:
    text = render(TranslationView(report).scores())
    assert "loss 5.21 nats per token, -1.82 below a unigram model's 3.39" in text
    lines = text.splitlines()
    head, total_line = (next(line for line in lines if mark in line) for mark in ("chrF", "all languages"))
    assert head.split() == ["pairs", "langs", "chrF", "copy", "freq", "BLEU", "copy", "freq"]
    assert total_line.split()[2:] == ["6", "4", "9.1", "3.0", "21.0", "0.0", "2.2", "0.0"]


def test_examples_are_shown_with_source_reference_and_translation(report: TranslationReport) -> None:
    text = render(TranslationView(report).examples())
    for example in report.examples:
        assert f"{example.lang}  {example.script}, {example.set}" in text
        assert f"source       {example.source}" in text
        assert f"reference    {example.reference}" in text


LANGUAGE = LanguageReport(
    sources={
        "django": SourceReport(12, 3400, 14_200, 2.5, 12.18, 0.8631, 2.12, 1.73),
        "empty": SourceReport(0, 0, 0, None, None, None, None, None),
        "all": SourceReport(12, 3400, 14_200, 2.5, 12.18, 0.8631, 2.12, 1.73),
    },
    completions=(Completion("django", "\nclass Field:\n    def ", "clean(self):\x1b[2J\n        pass"),),
)


def test_held_out_text_stands_beside_what_needs_no_learning() -> None:
    lines = [line.split() for line in render(LanguageView(LANGUAGE).scores()).splitlines()]
    assert ["documents", "size", "loss", "perplexity", "bits/byte", "unigram", "xz"] in lines
    assert ["django", "12", "14", "KiB", "2.500", "12.2", "0.863", "2.120", "1.730"] in lines
    assert ["empty", "0", "0", "B", *["-"] * 5] in lines
    assert ["all", "sources", *lines[2][1:]] in lines


def test_completions_follow_their_prompts_and_move_no_cursor() -> None:
    view = LanguageView(LANGUAGE)
    text = render(view.examples())
    assert "class Field:\n    def clean(self): [2J\n        pass" in text
    assert view.text_to_try() == "class Field:"


def test_reports_of_another_task_have_no_view() -> None:
    assert LanguageView.from_data(LANGUAGE.to_plain()) == LanguageView(LANGUAGE)
    for data in (None, {}, {"sets": {}}):
        assert LanguageView.from_data(data) is None
    for data in (None, {}, {"steps": 5}, {"perplexity": 3.5, "sets": ["validation"]}):
        assert TranslationView.from_data(data) is None


def test_a_modules_own_numbers_stand_below_its_loss() -> None:
    report = ModuleReport(9, 0.25, {"accuracy": 0.5, "perplexity\x1b[2J": None})
    view = ModuleView.from_data(json.loads(json.dumps(report.to_plain())))
    assert view == ModuleView(report)
    assert render(view.scores()).splitlines() == [
        "loss 0.25 of the batch after 9 steps", "accuracy 0.5", "perplexity [2J -",
    ]  # fmt: skip


def test_tokens_of_streamed_sources_stand_among_the_figures() -> None:
    progress = RunProgress("job-1", "x", 10)
    progress.metric = StepRecord.read({"step": 3, "loss": 2.5, "source_tokens": {"web": 1_234_567, "code\x1b[2J": 8}})
    assert figures(progress) == [("loss", "2.500"), ("web", "1,234,567 tokens"), ("code [2J", "8 tokens")]


GIB = 1 << 30


def rank(number: int, activity: str = "step 12", silent_s: float = 1.0, **fields: Any) -> dict[str, Any]:
    return {
        "rank": number, "host": "node-a", "pid": 100 + number, "phase": "step", "doing": activity, "for_s": 2.0,
        "idle_s": 0.0, "silent_s": silent_s, "device": None, **fields,
    }  # fmt: skip


def run(*ranks: dict[str, Any], num_ranks: int | None = None, silent_s: float = 0.5) -> dict[str, Any]:
    count = len(ranks) if num_ranks is None else num_ranks
    return {"silent_s": silent_s, "host": "node-a", "pid": 99, "num_ranks": count, "ranks": list(ranks)}


def render_ranks(of_run: dict[str, Any]) -> list[str]:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(rank_rows(of_run))
    return [" ".join(line.split()) for line in capture.get().splitlines()]


def gpu(share: float | None, used_gib: int) -> dict[str, Any]:
    return {"utilization": share, "memory_bytes": used_gib * GIB, "memory_total_bytes": 80 * GIB}


def test_each_rank_has_a_row_and_without_gpus_nothing_is_said_of_any() -> None:
    of_run = run(rank(0), rank(1, "all-reduce of gradients", silent_s=25.0))
    assert render_ranks(of_run) == [
        "0 step 12 for 0:02 last seen 0:01 ago node-a:100",
        "1 all-reduce of gradients for 0:02 last seen 0:25 ago node-a:101",
    ]
    assert gpu_use(of_run) == ""


def test_gpus_are_shown_by_rank_and_together() -> None:
    of_run = run(rank(0, device=gpu(0.9, 40)), rank(1, device=gpu(0.5, 60)))
    assert render_ranks(of_run)[0].endswith("90%, 40.00 GiB of 80.00 GiB")
    assert gpu_use(of_run) == "70% busy (least busy 50%), 60.00 GiB of 80.00 GiB in use on the fullest"
    assert gpu_use(run(rank(0, device=gpu(None, 8)))) == "8.00 GiB of 80.00 GiB in use"


def test_a_silent_driver_and_ranks_that_are_left_out_are_told() -> None:
    ranks = [rank(number) for number in range(63)] + [rank(900, silent_s=40.0)]
    lines = render_ranks(run(*ranks, num_ranks=1000, silent_s=30.0))
    assert lines[MAX_SHOWN - 1].startswith("900 step 12")
    assert lines[-2:] == ["and 984 more", "as of 0:30 ago: the driver (process 99 on node-a) is silent"]


def test_the_line_of_a_display_names_what_most_do_and_who_is_silent() -> None:
    line = describe_ranks(run(*(rank(number) for number in range(3)), rank(3, "checkpoint", silent_s=21.0)))
    assert line.plain == "4 ranks: step 12 (3), checkpoint (1); rank 3 silent for 0:21"
    assert describe_ranks(run()) is None
    single = describe_ranks(run(rank(0, "step 7\x1b[2J")))
    assert single.plain == "1 rank: step 7 [2J"


@pytest.mark.parametrize(
    ("corpus", "command"),
    [
        ("chat", "--chat TEXT"),
        ("preference", "--chat TEXT"),
        ("unpaired_preference", "--chat TEXT"),
        ("documents", "PROMPT"),
    ],
)
def test_a_model_of_conversations_is_used_by_chatting(corpus: str, command: str) -> None:
    spec = {"model": {"kind": "language"}, "data": {"corpus": corpus}}
    job = Job(cast(Any, None), cast(Any, None), {"spec": spec})  # no server is asked
    assert f"'shardyard generate {{job}} {command}'" in words_of(job).to_use_it


def executable(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("on_path", ["none", "another", "this"])
def test_a_command_to_type_next_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_path: str) -> None:
    own_program = executable(tmp_path / "my env" / "shardyard")
    other_program = executable(tmp_path / "bin" / "shardyard")
    monkeypatch.setattr(sys, "argv", [str(own_program), "up"])
    folders = {"none": tmp_path, "another": other_program.parent, "this": own_program.parent}
    monkeypatch.setenv("PATH", str(folders[on_path]))
    assert program() == ("shardyard" if on_path == "this" else f"'{own_program}'")


def test_a_module_goes_by_the_programs_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [__file__, "up"])
    assert program() == "shardyard"
