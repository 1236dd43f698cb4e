"""Upcycling at small scale: held-out loss of mixtures compared with the dense model that they are made of, after equal
further steps on the Python source of the installed packages (sparse upcycling, arXiv 2212.05055).

A small Llama is trained from scratch and exported to a folder. It and mixtures upcycled from the folder are then
trained further on the same batches, with new optimizer states and the same learning rates. Their losses at step 0 are
equal. This takes some minutes on one thread, and runs only when named, since it does not measure speed.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import results
from benchmarks.learning import LAYOUT, training
from moe.data.sequences import PreparedSequences
from moe.interchange import load_hf, save_hf
from moe.interchange.expand import expand
from moe.spec import JobSpec, LanguageModelSpec, UpcycleSpec
from moe.tasks.build import build_task
from service.settings import Settings

DENSE: dict[str, Any] = {
    "kind": "language", "model_dim": 96, "num_layers": 3, "vocab_size": 4096, "tie_embeddings": True, "ffn_dim": 288,
    "attention": {"kind": "grouped_query", "num_heads": 4, "num_kv_heads": 2, "head_dim": 24},
}  # fmt: skip
UPCYCLED: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "8 copies, 2 a token": {"num_experts": 8, "experts_per_token": 2},
    "8 copies in halves, 1 a token": {"num_experts": 8, "experts_per_token": 1, "granularity": 2},
}
"""The last uses the dense model's arithmetic per token, the second twice that in feed-forward layers."""
FIRST_STEPS, FURTHER_STEPS, EVERY_STEPS = 200, 150, 50
PEAK_LR = 3e-3
MAX_TOKENS, BATCH_TOKENS = 256, 1024
EVALUATION = {"max_sequences_along_the_way": 16}


def job(model: dict[str, Any], num_steps: int, seed: int) -> JobSpec:
    """A job on one worker whose learning rate ends at half of its peak."""
    fields = {
        "model": model, "data": {"corpus": "packages", "max_tokens": MAX_TOKENS},
        "train": {
            "num_steps": num_steps, "batch_tokens": BATCH_TOKENS, "seed": seed,
            "optimizer": {"name": "adamw", "peak_lr": PEAK_LR, "beta2": 0.98, "weight_decay": 0.1},
            "schedule": {"decay": "linear", "final_fraction": 0.5}, "evaluation": EVALUATION,
        },
        "resources": {"num_workers": 1},
    }  # fmt: skip
    return JobSpec.parse(expand(fields, None))


def held_out(model: nn.Module, spec: JobSpec, data: PreparedSequences) -> float:
    """Held-out loss in nats per token, the mean over sources."""
    losses = build_task(spec).measure_held_out(model, LAYOUT, data).losses
    source_losses = [loss for loss in losses.values() if loss is not None]
    return sum(source_losses) / len(source_losses)


def first(folder: Path, data: PreparedSequences, cache: Path) -> None:
    """Train the dense model from scratch and export it."""
    spec = job(DENSE, FIRST_STEPS, seed=0)
    *_, last = training(spec, data, cache)
    assert isinstance(spec.model, LanguageModelSpec)
    save_hf(last.state.model, folder, spec=spec.model, dtype=torch.float32, files=data.tokenizer_files())


def further(name: str, folder: Path, data: PreparedSequences, cache: Path, batches_of: JobSpec) -> dict[str, Any]:
    """Held-out losses of a model trained further from the folder."""
    upcycle = UPCYCLED[name]
    model = load_hf(folder, upcycle=None if upcycle is None else UpcycleSpec(**upcycle), seed=1)
    spec = job(model_from(folder, name), FURTHER_STEPS, seed=1)
    curve = [{"step": 0, "loss": held_out(model, spec, data)}]
    for snapshot in training(spec, data, cache, batches_of=batches_of):
        if snapshot.step % EVERY_STEPS == 0:
            curve.append({"step": snapshot.step, "loss": held_out(snapshot.state.model, spec, data)})
    return {
        "model": name, "parameters": spec.model.num_parameters(),
        "parameters_of_a_token": spec.model.num_active_parameters(), "curve": curve,
    }  # fmt: skip


def model_from(folder: Path, name: str) -> dict[str, Any]:
    """The `model` of a job that starts from the folder."""
    if UPCYCLED[name] is None:
        return {"from": str(folder)}
    return {"from": str(folder), "upcycle": UPCYCLED[name], "moe": {"group_tokens": MAX_TOKENS}}


def table(rows: list[dict[str, Any]]) -> list[str]:
    steps = [point["step"] for point in rows[0]["curve"]]
    lines = [
        "| Model | weights | of a token | " + " | ".join(f"step {step}" for step in steps) + " |",
        "|---" * (len(steps) + 3) + "|",
    ]
    for row in rows:
        losses = " | ".join(f"{point['loss']:.3f}" for point in row["curve"])
        sizes = f"{row['parameters'] / 1e6:.1f} M | {row['parameters_of_a_token'] / 1e6:.1f} M"
        lines.append(f"| {row['model']} | {sizes} | {losses} |")
    return lines


def main() -> None:
    torch.set_num_threads(1)
    cache = Settings().cache_dir
    data = build_task(job(DENSE, FIRST_STEPS, seed=0)).prepare(cache, report=print)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "dense"
        first(folder, data, cache)
        batches_of = job(model_from(folder, "dense"), FURTHER_STEPS, seed=1)
        rows = []
        for name in UPCYCLED:
            rows.append(further(name, folder, data, cache, batches_of))
            print(f"{name}: {rows[-1]['curve']}", flush=True)
    print("\n".join(table(rows)))
    settings = {
        "model": DENSE, "upcycled": UPCYCLED, "first_steps": FIRST_STEPS, "batch_tokens": BATCH_TOKENS,
        "max_tokens": MAX_TOKENS, "peak_lr": PEAK_LR, }  # fmt: skip
    print(f"written to {results.write('upcycling', {'settings': settings, 'models': rows})}")


if __name__ == "__main__":
    main()
