"""The paper's claim at small scale: more experts learn better for the same arithmetic (arXiv 2006.16668, section 4).

The demo's model with 8, 16 and 32 experts and its dense twin with the same floating-point operations per token train on
the same batches in the same order. Held-out loss is measured against steps and seconds of training, for three seeds.
Recorded runs are not repeated, so an interrupted benchmark continues.
"""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.learning import LAYOUT, training
from moe.data.pairs import PreparedPairs
from moe.spec import JobSpec, read_job
from moe.tasks.build import build_task
from service.settings import Settings

ROOT = Path(__file__).parents[1]
EXAMPLE, DOCS = ROOT / "examples" / "translate-longer.yaml", ROOT / "docs"
MODELS: dict[str, int | None] = {"dense": None, "8 experts": 8, "16 experts": 16, "32 experts": 32}
SEEDS = (0, 1, 2)
EVALUATION = {"max_pairs_along_the_way": 1500}
EVERY_STEPS = 250
SETS = ("seen", "unseen")


def job(num_experts: int | None, seed: int) -> JobSpec:
    """The example's job for this model and this seed."""
    spec = read_job(EXAMPLE)
    model: dict[str, Any] = {"preset": "gshard-tiny-dense"}
    if num_experts is not None:
        model = {"preset": "gshard-tiny", "moe": {"num_experts": num_experts}}
    fields = spec.model_dump(mode="json", exclude_defaults=True)
    fields |= {
        "model": model,
        "train": {**fields["train"], "seed": seed, "evaluation": EVALUATION},
        "resources": {"num_workers": 1},
        "parallel": "auto",
    }
    return JobSpec.parse(fields)


def train(num_experts: int | None, seed: int, data: PreparedPairs, cache: Path) -> list[dict[str, Any]]:
    """Held-out losses every `EVERY_STEPS` steps, with the seconds of training until then."""
    curve, drop_shares = [], []
    for snapshot in training(job(num_experts, seed), data, cache, batches_of=job(8, seed)):
        drop_shares += [layer.dropped for layer in snapshot.record.layers]
        if snapshot.step % EVERY_STEPS == 0:
            losses = snapshot.state.task.measure_held_out(snapshot.state.model, LAYOUT, data).losses
            share = statistics.fmean(drop_shares) if drop_shares else None
            curve.append({"step": snapshot.step, "seconds": snapshot.seconds, "dropped": share, **losses})
            drop_shares.clear()
    return curve


def runs(records: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """All runs so far, after each run: recorded runs, then the missing ones."""
    yield records
    missing = [
        (name, seed)
        for seed in SEEDS
        for name in MODELS
        if not any((run["model"], run["seed"]) == (name, seed) for run in records)
    ]
    if not missing:
        return
    cache = Settings().cache_dir
    data = build_task(job(8, 0)).prepare(cache, report=print)
    for name, seed in missing:
        curve = train(MODELS[name], seed, data, cache)
        print(f"{name}, seed {seed}: {curve[-1]}", flush=True)
        machine = results.machine()["processor"]
        records = [*records, {"model": name, "seed": seed, "processor": machine, "curve": curve}]
        yield records


def of_model(recorded_runs: list[dict[str, Any]], name: str) -> list[list[dict[str, Any]]]:
    return [run["curve"] for run in recorded_runs if run["model"] == name]


def at_seconds(curve: list[dict[str, Any]], seconds: float, set_name: str) -> float:
    """Loss after a number of seconds of training, interpolated between two measurements."""
    before = max((point for point in curve if point["seconds"] <= seconds), key=lambda point: point["step"])
    after = next((point for point in curve if point["seconds"] > seconds), before)
    if after is before:
        return float(before[set_name])
    share = (seconds - before["seconds"]) / (after["seconds"] - before["seconds"])
    return float(before[set_name] + share * (after[set_name] - before[set_name]))


def mean_and_spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def table(recorded_runs: list[dict[str, Any]]) -> list[str]:
    """Markdown table: losses at equal steps and at equal seconds, means and the seeds' range."""
    names = [name for name in MODELS if of_model(recorded_runs, name)]
    last = of_model(recorded_runs, names[0])[0][-1]["step"]
    lines = [
        "| Model | parameters | at | seen English | unseen English | seconds | dropped |",
        "|---|---|---|---|---|---|---|",
    ]
    seconds = min(curve[-1]["seconds"] for run in recorded_runs for curve in [run["curve"]])
    for at_step in (last // 4, last // 2, last):
        for name in names:
            points = [next(p for p in curve if p["step"] == at_step) for curve in of_model(recorded_runs, name)]
            seen_loss, unseen_loss = (mean_and_spread([point[set_name] for point in points]) for set_name in SETS)
            drops = [point["dropped"] for point in points if point["dropped"] is not None]
            drop = f"{statistics.fmean(drops):.1%}" if drops else "–"
            took = statistics.fmean(point["seconds"] for point in points)
            size = job(MODELS[name], 0).model.num_parameters() / 1e6
            lines.append(
                f"| {name} | {size:.1f} M | {at_step:,} steps | {seen_loss} | {unseen_loss} | {took:.0f} | {drop} |"
            )
    for name in names:
        curves = of_model(recorded_runs, name)
        seen_loss, unseen_loss = (
            mean_and_spread([at_seconds(curve, seconds, set_name) for curve in curves]) for set_name in SETS
        )
        size = job(MODELS[name], 0).model.num_parameters() / 1e6
        lines.append(
            f"| {name} | {size:.1f} M | {seconds:.0f} seconds | {seen_loss} | {unseen_loss} | {seconds:.0f} | |"
        )
    return lines


def draw(recorded_runs: list[dict[str, Any]], path: Path) -> None:
    """Held-out loss against steps and against seconds: the mean of the seeds, and their range as a band."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "shardyard"
    from matplotlib import pyplot, ticker

    figure, panels = pyplot.subplots(2, 2, figsize=(10, 7), sharey="row", constrained_layout=True)
    for row, set_name in enumerate(SETS):
        for column, unit in enumerate(("step", "seconds")):
            panel = panels[row][column]
            for name in MODELS:
                curves = of_model(recorded_runs, name)
                if not curves:
                    continue
                points = list(zip(*curves, strict=True))
                x = [statistics.fmean(point[unit] for point in group) for group in points]
                losses = [[point[set_name] for point in group] for group in points]
                (line,) = panel.plot(x, [statistics.fmean(seed_losses) for seed_losses in losses], label=name)
                panel.fill_between(
                    x,
                    [min(seed_losses) for seed_losses in losses],
                    [max(seed_losses) for seed_losses in losses],
                    alpha=0.2,
                    color=line.get_color(),
                )
            panel.set_xlabel("steps" if unit == "step" else "seconds of training")
            panel.set_title(f"{set_name} English")
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 4, 5)))
            panel.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            panel.yaxis.set_minor_formatter(ticker.NullFormatter())
            panel.grid(alpha=0.3)
        panels[row][0].set_ylabel("held-out loss, nats a token")
    panels[0][0].legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(2)
    path = results.FOLDER / "quality.json"
    records = json.loads(path.read_text())["figures"] if path.is_file() else []
    for recorded_runs in runs(records):
        if len(recorded_runs) > len(records):
            results.write("quality", recorded_runs)
    lines = table(recorded_runs)
    print("\n".join(lines))
    draw(recorded_runs, DOCS / "quality.svg")
    seeds = len({run["seed"] for run in recorded_runs})
    processors = " and ".join(sorted({run["processor"] for run in recorded_runs}))
    (DOCS / "quality.md").write_text(
        "# Experts against a dense twin\n\n"
        "This page is written by `make quality`. The demo's model with 8, 16 and 32 experts and its dense twin (the "
        "same floating-point operations per token) are trained on the same batches in the same order. Losses are "
        f"held-out, in nats per target token: the mean of {seeds} seeds and their range. Times are training time only, "
        f"on two threads ({processors}).\n\n"
        "![Held-out loss against steps and against seconds](quality.svg)\n\n" + "\n".join(lines) + "\n"
    )
    print(f"written to {path}, docs/quality.md and docs/quality.svg")


if __name__ == "__main__":
    main()
