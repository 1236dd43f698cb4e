"""Figures in the documents are those of benchmarks/results, which `make bench` writes with machine and versions."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SERVICE, LANGUAGE = "docs/measured.md", "docs/language-models.md"
Figures = Callable[[Any], list[str]]
"""Text of the figures that a row has to contain, from a file's figures."""


def training(workers: int) -> Figures:
    def format_figures(figures: Any) -> list[str]:
        (run,) = (run for run in figures if run["num_workers"] == workers)
        return [f"{round(run['tokens_per_s'], -2):,}"]

    return format_figures


def cases(*keys: str) -> Figures:
    return lambda figures: [f"{case[key]:.2f}" for case in figures["cases"] for key in keys]


SERVICE_ROWS: dict[str, tuple[str, Figures]] = {
    "demo model, one worker with two threads, tokens/s": ("training", training(1)),
    "demo model, two workers with one thread each, experts split over both, tokens/s": ("training", training(2)),
    "waiting for data, share of a step": ("training", lambda f: [f"{100 * f[0]['waiting_for_data']:.2f}%"]),
    "submit to first finished step, warm (bare Ray Train to its first line)": (
        "launch_time", lambda f: [f"{f['first_step_s']:.1f} s ({f['bare_ray_train_s']:.1f})", f"{f['limit_s']:.0f} s"]),
    "end of a step to its event at a client, 95th percentile": (
        "stream_delay", lambda f: [f"{f['p95_s']:.2f} s", f"{f['limit_p95_s']:.0f} s"]),
    "recording a step, share of 50 ms": (
        "recording", lambda f: [f"{100 * f['call_share_of_50_ms_step']:.2f}%", f"{100 * f['limit_share']:.0f}%"]),
    "`POST /v1/jobs`, 10,000 jobs, 8 clients, cluster unreachable, 95th percentile": (
        "control_plane", lambda f: [f"{f['post_job']['p95_ms']:.0f} ms"]),
    "`GET /v1/jobs`, 20 rows, otherwise the same": ("control_plane", lambda f: [f"{f['list_20']['p95_ms']:.0f} ms"]),
    "control plane, 10,000 jobs and 100 open streams": (
        "control_plane", lambda f: [f"{int(f['rss_streams_mb'] + 0.5):.0f} MB"]),
}  # fmt: skip
"""Rows of docs/measured.md with a figure of each machine, and for some their limit; others were read off a run."""
LANGUAGE_ROWS: dict[str, tuple[str, Figures]] = {
    "a training step of a small decoder": (
        "language_step", lambda f: [f"{case['ratio']:.2f}" for case in f["cases"] if case["dtype"] == "float32"]),
    "the same in bfloat16, theirs under autocast, two threads": (
        "language_step", lambda f: [f"{f['cases'][1]['ratio']:.1f}"]),
    "memory of the step over theirs": (
        "language_step", lambda f: [f"{best(case['memory_ratio'] for case in f['cases']):.2f}" for best in (min, max)]),
    "a step of adapters of rank 16": ("adapter_step", cases("ratio", "memory_ratio")),
    "text in float32 over transformers' `generate`": ("language_generation", cases("ratio")),
    "reading a folder of 4.05 GB": ("interchange", lambda f: [f"{f['load']['of_plain_loop']:.2f}"]),
    "writing it from one rank": (
        "interchange", lambda f: [f"{f['export']['of_plain_loop']:.2f}",
                                  f"{f['export']['of_two_ranks_beyond_part_bytes'] / 1e6:.0f} MB"]),
    "preparing `corpus: packages`": (
        "packages", lambda f: [f"{f['seconds']:.0f} s", f"{100 * f['train']['waste']:.2f}%"]),
}  # fmt: skip


def words(document: str) -> str:
    return " ".join((ROOT / document).read_text().split())


def cells(document: str, row: str) -> list[str]:
    """Cells of the only row that begins with this text, without the first cell."""
    (line,) = (line for line in (ROOT / document).read_text().splitlines() if line.startswith(f"| {row}"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def figures_of(path: str) -> Any:
    return json.loads((RESULTS / f"{path}.json").read_text())["figures"]


def assert_shown(cell: str, figure: str) -> None:
    assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d]|[.,]\d)", cell), f"no {figure} in {cell!r}"


@pytest.mark.parametrize(("column", "folder"), [(0, ""), (1, "xeon/")], ids=["EPYC", "Xeon"])
@pytest.mark.parametrize("row", SERVICE_ROWS)
def test_rows_about_the_service(row: str, column: int, folder: str) -> None:
    name, format_figures = SERVICE_ROWS[row]
    figure, *limit = format_figures(figures_of(folder + name))
    assert_shown(cells(SERVICE, row)[column], figure)
    assert not limit or cells(SERVICE, row)[2] == limit[0]


@pytest.mark.parametrize("row", LANGUAGE_ROWS)
def test_rows_about_language_models(row: str) -> None:
    name, format_figures = LANGUAGE_ROWS[row]
    for figure in format_figures(figures_of(name)):
        assert_shown(cells(LANGUAGE, row)[0], figure)


def test_figures_of_gpus() -> None:
    steps = [case for case in figures_of("decoder_step_gpu")["cases"] if case["micro_batches"] == 1]
    own_ms, under_autocast, narrow = (f"{case['median_ms']:.0f} ms" for case in steps)
    text = words(SERVICE)
    assert f"takes {own_ms}; transformers takes {under_autocast} with autocast" in text
    assert f"weights, and {narrow} with bfloat16" in text
    (num_skipped,) = re.findall(r"\d+ passed, (\d+) skipped", (RESULTS / "h200" / "gpu_tests.log").read_text())
    assert (num_skipped, "`tests/gpu` passed on the H200, except for six tests that" in text) == ("6", True)
    for case in figures_of("layer_gpu")["cases"]:
        *texts, limit = cells(SERVICE, case["model"].split(",")[0])
        layers = [
            case["layers"][side] for side in ("shardyard", "shardyard, narrow weights", "transformers grouped_mm")
        ]
        assert texts[:3] == [f"{layer['median_ms']:.1f} ({layer['peak_mib']:,.0f})" for layer in layers], case["model"]
        assert limit == f"{case['layers']['limit']['median_ms']:.1f}", case["model"]


def test_figures_in_sentences() -> None:
    runs = [[run["tokens_per_s"] for run in figures_of(f"{folder}training")] for folder in ("", "xeon/")]
    ratios = sorted(first / second for first, second in runs)
    ((lowest, highest),) = re.findall(r"processes ([\d.]+) to ([\d.]+) times as many tokens per second", words(SERVICE))
    assert [f"{ratio:.1f}" for ratio in ratios] == [lowest, highest]
    for package, figures in figures_of("packages")["held_out"].items():
        (figure,) = re.findall(rf"{package} [\d.]+, [\d.]+ and ([\d.]+)[;)]", words(LANGUAGE))
        assert figure == f"{figures['xz_bits_per_byte']:.2f}", package
