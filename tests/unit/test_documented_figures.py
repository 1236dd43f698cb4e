"""Figures in the documents are those that `make bench` keeps, with machine and versions, in benchmarks/results."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
Figures = Callable[[Any], list[str]]
"""What a row has to hold of the figures of a file of results, as it is written there."""


def _of_training(workers: int) -> Figures:
    def shown(figures: Any) -> list[str]:
        (run,) = (run for run in figures if run["num_workers"] == workers)
        return [f"{round(run['tokens_per_s'], -2):,}"]

    return shown


MEASURED: dict[str, tuple[str, Figures]] = {
    "demo model, one worker with two threads, tokens/s": ("training", _of_training(1)),
    "demo model, two workers with one thread each, experts split over both, tokens/s": (
        "training", _of_training(2)),
    "waiting for data, share of a step": ("training", lambda figures: [f"{100 * figures[0]['waiting_for_data']:.2f}%"]),
    "submit to first finished step, warm (bare Ray Train to its first line)": (
        "launch_time", lambda figures: [f"{figures['first_step_s']:.1f} s ({figures['bare_ray_train_s']:.1f})"]
    ),
    "end of a step to its event at a client, 95th percentile": (
        "stream_delay", lambda figures: [f"{figures['p95_s']:.2f} s"]
    ),
    "recording a step, share of 50 ms": (
        "recording", lambda figures: [f"{100 * figures['call_share_of_50_ms_step']:.2f}%"]
    ),
    "`POST /v1/jobs`, 10,000 jobs, 8 clients, cluster unreachable, 95th percentile": (
        "control_plane", lambda figures: [f"{figures['post_job']['p95_ms']:.0f} ms"]
    ),
    "`GET /v1/jobs`, 20 rows, otherwise the same": (
        "control_plane", lambda figures: [f"{figures['list_20']['p95_ms']:.0f} ms"]
    ),
    "control plane, 10,000 jobs and 100 open streams": (
        "control_plane", lambda figures: [f"{_half_up(figures['rss_streams_mb']):.0f} MB"]
    ),
}  # fmt: skip
"""Rows of docs/measured.md whose figures are in a file; others were read off a run."""


def _half_up(number: float) -> int:
    return int(number + 0.5)


def _cases(*keys: str, form: str = ".2f") -> Figures:
    return lambda figures: [f"{case[key]:{form}}" for case in figures["cases"] for key in keys]


def _case(index: int, key: str, form: str) -> Figures:
    return lambda figures: [f"{figures['cases'][index][key]:{form}}"]


LANGUAGE_MODELS: dict[str, tuple[str, Figures]] = {
    "a training step of a small decoder": ("language_step", lambda figures: [
        f"{case['ratio']:.2f}" for case in figures["cases"] if case["dtype"] == "float32"]),
    "the same in bfloat16, theirs under autocast, two threads": ("language_step", _case(1, "ratio", ".1f")),
    "memory of the step over theirs": ("language_step", lambda figures: [
        f"{best({case['memory_ratio'] for case in figures['cases']}):.2f}" for best in (min, max)]),
    "a step of adapters of rank 16": ("adapter_step", _cases("ratio", "memory_ratio")),
    "text in float32 over transformers' `generate`": ("language_generation", _cases("ratio")),
    "reading a folder of 4.05 GB": ("interchange", lambda figures: [f"{figures['load']['of_plain_loop']:.2f}"]),
    "writing it from one rank": ("interchange", lambda figures: [
        f"{figures['export']['of_plain_loop']:.2f}",
        f"{figures['export']['of_two_ranks_beyond_part_bytes'] / 1e6:.0f} MB"]),
    "preparing `corpus: packages`": ("packages", lambda figures: [
        f"{figures['seconds']:.0f} s", f"{100 * figures['train']['waste']:.2f}%"]),
}  # fmt: skip


def _text(document: str) -> str:
    return (ROOT / document).read_text()


def _cells(document: str, row: str) -> list[str]:
    """The cells of the one row that begins so, without its first."""
    (line,) = (line for line in _text(document).splitlines() if line.startswith(f"| {row}"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def _figures(path: str) -> Any:
    return json.loads((RESULTS / f"{path}.json").read_text())["figures"]


def _check(cell: str, expected: list[str]) -> None:
    for figure in expected:
        assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d]|[.,]\d)", cell), f"no {figure} in {cell!r}"


@pytest.mark.parametrize(("column", "folder"), [(0, ""), (1, "xeon/")], ids=["EPYC", "Xeon"])
@pytest.mark.parametrize("row", MEASURED)
def test_rows_about_the_service(row: str, column: int, folder: str) -> None:
    name, shown = MEASURED[row]
    _check(_cells("docs/measured.md", row)[column], shown(_figures(folder + name)))


@pytest.mark.parametrize("row", LANGUAGE_MODELS)
def test_rows_about_language_models(row: str) -> None:
    name, shown = LANGUAGE_MODELS[row]
    _check(_cells("docs/language-models.md", row)[0], shown(_figures(name)))


def test_limits_are_those_of_the_benchmarks() -> None:
    for row, name, shown in (
        ("submit to first finished step", "launch_time", lambda figures: f"{figures['limit_s']:.0f} s"),
        ("end of a step to its event", "stream_delay", lambda figures: f"{figures['limit_p95_s']:.0f} s"),
        ("recording a step", "recording", lambda figures: f"{100 * figures['limit_share']:.0f}%"),
    ):
        assert _cells("docs/measured.md", row)[2] == shown(_figures(name)), row


def test_figures_of_the_gpu() -> None:
    cases = [case for case in _figures("decoder_step_gpu")["cases"] if case["micro_batches"] == 1]
    ours, under_autocast, narrow = (f"{case['median_ms']:.0f} ms" for case in cases)
    text = " ".join(_text("docs/measured.md").split())
    assert f"takes {ours}; transformers takes {under_autocast} with autocast" in text
    assert f"weights, and {narrow} with bfloat16" in text
    (skipped,) = re.findall(r"\d+ passed, (\d+) skipped", (RESULTS / "h200" / "gpu_tests.log").read_text())
    assert (skipped, "`tests/gpu` passed on the H200, except for six tests that" in text) == ("6", True)


def test_figures_of_the_layer_on_a_gpu() -> None:
    sides = ("shardyard", "shardyard, narrow weights", "transformers grouped_mm")
    for case in _figures("layer_gpu")["cases"]:
        cells = _cells("docs/measured.md", case["model"].split(",")[0])
        for side, cell in zip(sides, cells, strict=False):
            layer = case["layers"][side]
            assert cell == f"{layer['median_ms']:.1f} ({layer['peak_mib']:,.0f})", case["model"]
        assert cells[-1] == f"{case['layers']['limit']['median_ms']:.1f}", case["model"]


def test_two_workers_on_two_cores_take_as_much_longer_as_documented() -> None:
    ratios = []
    for folder in ("", "xeon/"):
        alone, together = (run["tokens_per_s"] for run in _figures(f"{folder}training"))
        ratios.append(alone / together)
    text = " ".join(_text("docs/measured.md").split())
    least, most = re.findall(r"does ([\d.]+) to ([\d.]+) times as many tokens per second", text)[0]
    assert [f"{min(ratios):.1f}", f"{max(ratios):.1f}"] == [least, most]


def test_how_well_xz_does_on_held_out_packages() -> None:
    text = " ".join(_text("docs/language-models.md").split())
    for package, figures in _figures("packages")["held_out"].items():
        (shown,) = re.findall(rf"{package} [\d.]+, [\d.]+ and ([\d.]+)[;)]", text)
        assert shown == f"{figures['xz_bits_per_byte']:.2f}", package
