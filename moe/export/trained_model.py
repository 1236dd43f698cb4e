"""Trained model with its tokenizers, loaded from a committed checkpoint: one process, no service, no Ray."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moe.parallel import Layout
from moe.spec import ModelSpec, ModuleModelSpec, SpecError
from moe.spec.generation import GenerationSpec
from moe.storage.folder import Folder
from moe.tasks.build import build_task
from moe.tasks.task import Generator, Task
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint import shards
from moe.train.checkpoint.checkpointer import CheckpointError
from moe.train.checkpoint.run_files import TOKENIZERS, files_of
from moe.train.checkpoint.spec_changes import spec_of


@dataclass(frozen=True)
class TrainedModel:
    """Trained model with its generator."""

    model: nn.Module
    spec: ModelSpec
    dtype: str
    """Compute dtype."""
    generator: Generator
    """Inference with the model."""
    max_tokens: int
    """Longest training text."""
    step: int

    def generate(self, texts: Sequence[str], spec: GenerationSpec | None = None) -> list[str]:
        """Generate an output for each text; greedy decoding without `spec`."""
        return self.generator.generate(texts, spec)

    @classmethod
    def load(
        cls, checkpoint_folder: str, device: torch.device | str = "cpu", *, use_ema: bool = False
    ) -> "TrainedModel":
        """Load a checkpoint's folder (a path or fsspec URL, `.../checkpoints/step-...`) into one process; with
        `use_ema`, the average of its weights.

        Verifies all files against the checkpoint's marker first. Raises CheckpointError if the checkpoint is
        uncommitted, damaged, not written by a run (even if sealed), or of a user's module, whose code is not run.
        """
        parent, _, name = checkpoint_folder.rstrip("/").rpartition("/")
        return cls.from_checkpoint(Folder(parent or "."), name, device, use_ema=use_ema)

    @classmethod
    def from_checkpoint(
        cls, checkpoints: Folder, name: str, device: torch.device | str = "cpu", *, use_ema: bool = False
    ) -> "TrainedModel":
        """Like `load`, for a checkpoint by name in a job's `checkpoints` folder."""
        step, checkpoint = verify_checkpoint(checkpoints, name).step, checkpoints.subfolder(name)
        try:
            spec = spec_of(checkpoint)
            if isinstance(spec.model, ModuleModelSpec):
                raise CheckpointError(module_checkpoint_error(checkpoint, spec.model))
            task = build_task(spec)
            layout, base_names = Layout.single(device), task.omitted_from_checkpoints()
            model = task.build_model(layout).eval()
            if base_names:
                _load_base_weights(task, model, layout, checkpoint)
            tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in base_names}
            stored = stored_names(checkpoint, use_ema=use_ema)
            shards.load(checkpoint, {stored(name): tensor for name, tensor in tensors.items()})
            generator = task.generator(
                model, spec.data.max_tokens, lambda name: checkpoint.read(f"{TOKENIZERS}/{name}")
            )
        except (ValueError, FileNotFoundError) as error:
            raise CheckpointError(f"{checkpoint.url} must be a run's checkpoint: {error}") from error
        return cls(model, spec.model, spec.train.dtype, generator, spec.data.max_tokens, step)


def stored_names(checkpoint: Folder, *, use_ema: bool) -> Callable[[str], str]:
    """Function from a parameter's name to that of the checkpoint's tensor: the weights, or their average where there is
    one. Raises CheckpointError if an average is wanted and the checkpoint has none."""
    names = set(shards.stored_tensors(checkpoint)) if use_ema else set()
    if use_ema and not any(name.startswith("ema.") for name in names):
        raise CheckpointError(
            f"{checkpoint.url} has no average of the weights: it was trained without train.ema_decay; "
            "omit --ema to use the weights"
        )
    return lambda name: f"ema.{name}" if f"ema.{name}" in names else f"model.{name}"


def _load_base_weights(task: Task[Any, Any], model: nn.Module, layout: Layout, checkpoint: Folder) -> None:
    """Load the base weights that an adapter's checkpoint omits. Raises CheckpointError."""
    try:
        task.check_base(files_of(checkpoint), None)
        task.begin(model, layout, None)
    except SpecError as error:
        raise CheckpointError(f"{checkpoint.url} has only an adapter, and {error}") from error


def module_checkpoint_error(checkpoint: Folder, spec: ModuleModelSpec) -> str:
    return (
        f"{checkpoint.url} is a checkpoint of a user's module (model.build={spec.build!r}), whose code is "
        "not run here; load its weights with torch: torch.distributed.checkpoint.load(tensors, "
        "checkpoint_id=FOLDER) fills a module's state_dict(), each name prefixed with "
        "'model.', as in examples/recommender/score.py"
    )


def verify_checkpoint(checkpoints: Folder, name: str) -> markers.Marker:
    rule = "must be a committed, intact checkpoint"
    try:
        marker = markers.read(checkpoints, name)
        if (fault := markers.fault(checkpoints, marker)) is None:
            return marker
    except FileNotFoundError:
        fault = f"it has no marker {name}{markers.SUFFIX}"
    except ValueError as error:
        fault = str(error)
    committed_names = ", ".join(markers.list_committed(checkpoints)) or "none"
    raise CheckpointError(
        f"{checkpoints.url_of(name)} {rule}, but {fault}; committed checkpoints next to it: {committed_names}"
    )
