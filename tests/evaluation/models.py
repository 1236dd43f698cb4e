"""A small trained model from a folder in the Hugging Face format, and tasks of random documents."""

import json
from pathlib import Path
from random import Random
from typing import Any

import torch

from moe.spec import JobSpec
from tests.interchange.test_jobs import further, mixtral
from tests.unit.train_runs import run

WORDS = ["import os", "def test_", "(tmp_path)", "return", "assert", "None", "für alle", "天", "x = 1\n", "the", "[0]",
         "  "]  # fmt: skip


def trained_job(folder: Path, **adapter: Any) -> tuple[JobSpec, Path]:
    """(job of a few steps that starts from `folder`/hub, its storage)."""
    spec = further(mixtral(folder / "hub", dtype=torch.float32), folder)
    if adapter:
        spec = JobSpec.parse({**spec.model_dump(mode="json"), "adapter": adapter})
    run(spec, folder / "storage", folder / "cache")
    return spec, folder / "storage"


def checkpoint_in(storage: Path) -> Path:
    (checkpoint,) = (folder for folder in storage.glob("checkpoints/step-00000004*") if folder.is_dir())
    return checkpoint


def text(random: Random, max_words: int) -> str:
    return " ".join(random.choice(WORDS) for _ in range(random.randint(1, max_words)))


def documents(random: Random, number: int = 12) -> list[dict[str, Any]]:
    """Random documents with different choices; the right one is given by index and by text."""
    rows = []
    for _ in range(number):
        choices = random.sample(WORDS[:-1], random.randint(2, 4))
        right = random.randrange(len(choices))
        rows.append({
            "question": text(random, 30), "choices": choices, "index": right, "answer": choices[right],
            "other": choices[right - 1], "text": text(random, 60),
        })  # fmt: skip
    return rows


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def task(**keys: Any) -> dict[str, Any]:
    """A task of choices on `data.jsonl`."""
    return {
        "task": "choices", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "data.jsonl"}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "question", "doc_to_target": "index",
        "doc_to_choice": "choices", **keys,
    }  # fmt: skip
