"""Exported models in standard formats: safetensors, Hugging Face tokenizers, JSON.

model.safetensors   all parameters by name, unsharded, in their training dtype
config.json         model kind and dimensions (a ModelSpec), compute dtype, step
tokenizer.json      byte-level BPE, or the task's own tokenizer files
"""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from moe.export.trained_model import TrainedModel
from moe.parallel import Layout
from moe.spec import model_spec
from moe.storage.home import expand_home
from moe.tasks.build import build_model, task_class

FORMAT_VERSION = 1
WEIGHTS, CONFIG = "model.safetensors", "config.json"


class ExportError(Exception):
    """The folder cannot be written, or has no exported model; the message says why."""


def is_exported(folder: str | Path) -> bool:
    """Whether the folder has the files that `save_exported` writes."""
    return (Path(folder) / CONFIG).is_file() and (Path(folder) / WEIGHTS).is_file()


def save_exported(trained_model: TrainedModel, folder: str | Path) -> Path:
    """Write the model to a new folder, atomically; return its path.

    Raises ExportError if the folder exists and is not empty, OSError if it cannot be written.
    """
    folder = expand_home(folder).absolute()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ExportError(f"{folder} already exists; name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    try:  # an interruption may come as soon as the folder exists
        draft.mkdir()
        tensors = {name: tensor.contiguous() for name, tensor in trained_model.model.state_dict().items()}
        save_file(tensors, draft / WEIGHTS, metadata={"format": "pt"})
        config = {
            "version": FORMAT_VERSION,
            "step": trained_model.step,
            "max_tokens": trained_model.max_tokens,
            "dtype": trained_model.dtype,
            "model": trained_model.spec.model_dump(mode="json"),
        }
        (draft / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        trained_model.generator.save_tokenizers(draft)
        draft.replace(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def load_exported(folder: str | Path, device: torch.device | str = "cpu") -> TrainedModel:
    """Load a model that `save_exported` wrote. Raises ExportError for other folders."""
    folder = Path(folder)
    if not is_exported(folder):
        raise ExportError(f"{folder} holds no exported model: it has no {CONFIG} and {WEIGHTS}")
    try:
        config = json.loads((folder / CONFIG).read_text())
        version = config["version"]
    except (ValueError, KeyError, TypeError):
        raise ExportError(f"{folder} holds another tool's model: its {CONFIG} has no shardyard version") from None
    if version != FORMAT_VERSION:
        raise ExportError(f"{folder} has version {version!r}; this release reads {FORMAT_VERSION}")
    spec, dtype, max_tokens = model_spec(config["model"]), config["dtype"], config["max_tokens"]
    model = build_model(spec, Layout.single(device), dtype=getattr(torch, dtype)).eval()
    model.load_state_dict(load_file(folder / WEIGHTS, device=str(device)))
    generator = task_class(spec).generator(model, max_tokens, lambda name: (folder / name).read_bytes())
    return TrainedModel(model, spec, dtype, generator, max_tokens, config["step"])
