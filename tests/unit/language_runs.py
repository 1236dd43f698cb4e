"""A small language model's job, for tests: source files, and a run of a few steps."""

from pathlib import Path
from typing import Any

from moe.spec import JobSpec

_DOCUMENTS = Path(__file__).parent / "documents"
"""Source files as they were at some time: which documents are held out depends on what they say."""


def documents(folder: Path) -> dict[str, Any]:
    """The data part of a job: source files, copied to a folder where a service allows data."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(_DOCUMENTS.glob("*.txt")):
        (folder / path.with_suffix(".py").name).write_bytes(path.read_bytes())
    return {
        "corpus": "documents", "max_tokens": 64, "held_out": 0.1,
        "sources": [{"name": "tests", "paths": [f"{folder}/*.py"]}],
    }  # fmt: skip


def language_job(
    data: dict[str, Any], *, num_steps: int = 4, workers: int = 1, model: dict[str, Any] | None = None, **parts: Any
) -> JobSpec:
    """A job of a few steps on a model of four experts a layer; `model` and `train` override parts of those, and other
    arguments are top-level parts."""
    train = {
        "num_steps": num_steps, "batch_tokens": 256, "optimizer": {"name": "adamw", "peak_lr": 1e-2},
        **parts.pop("train", {}),
    }  # fmt: skip
    return JobSpec.parse({
        "name": "language", "data": data,
        "model": {
            "kind": "language", "model_dim": 32, "num_layers": 2, "vocab_size": 400, "ffn_dim": 64,
            "attention": {"kind": "grouped_query", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
            "moe": {"num_experts": 4, "hidden_dim": 24, "router": "softmax_topk", "top_k": 2, "group_tokens": 128},
            **(model or {}),
        },
        "train": train, "resources": {"num_workers": workers}, "checkpoint": {"every_steps": 2}, **parts,
    })  # fmt: skip
