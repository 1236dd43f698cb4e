"""Rules of jobs that train a user's module."""

from collections.abc import Iterator

from moe.spec.base import Spec
from moe.spec.data import DataSpec
from moe.spec.errors import Problem
from moe.spec.model import ModelSpec
from moe.spec.module import ModuleDataSpec, ModuleModelSpec
from moe.spec.parallel import ParallelSpec
from moe.spec.resources import CheckpointSpec
from moe.spec.train import TrainSpec

_LIBRARY_ONLY_FIELDS = (
    "batch_tokens", "label_smoothing", "preference_loss", "preference_beta", "preference_margin", "desirable_weight",
    "undesirable_weight", "dtype", "evaluation", "freeze", "ema_decay", "cuda_graphs",
)  # fmt: skip
"""Fields of `train` that apply only to this library's models."""


def problems_of_module(
    model: ModelSpec, data: DataSpec, train: TrainSpec, checkpoint: CheckpointSpec, parallel: ParallelSpec
) -> Iterator[Problem]:
    """Problems of a user's module: it requires its own batches, and rejects settings for computation or precision."""
    if not isinstance(data, ModuleDataSpec):
        yield Problem("not_applicable", "data.corpus", data.corpus, "does not apply to a module model",
                      "use corpus module, with the function that returns batches")  # fmt: skip
        return
    if not isinstance(model, ModuleModelSpec):
        yield Problem("not_applicable", "model.kind", model.kind, "cannot use a module's batches",
                      "use kind module, or another corpus")  # fmt: skip
        return
    default = TrainSpec(num_steps=train.num_steps)
    for name in _LIBRARY_ONLY_FIELDS:
        if (value := getattr(train, name)) != getattr(default, name):
            plain_value = None if isinstance(value, Spec) else value
            yield Problem("not_applicable", f"train.{name}", plain_value, "does not apply to a user's module",
                          "omit it: the module's own code decides it")  # fmt: skip
    if getattr(train.optimizer, "moments", None) == "8bit":
        yield Problem("not_applicable", "train.optimizer.moments", "8bit", "does not apply to a user's module",
                      "use float32 or bfloat16")  # fmt: skip
    if checkpoint.keep_best is not None:
        yield Problem("not_applicable", "checkpoint.keep_best", None, "does not apply to a user's module",
                      "omit it: the module has no held-out data")  # fmt: skip
    for name in type(parallel).model_fields:
        if (value := getattr(parallel, name)) != getattr(ParallelSpec(), name):
            plain_value = list(value) if isinstance(value, tuple) else value
            yield Problem("not_applicable", f"parallel.{name}", plain_value, "does not apply to a user's module",
                          "omit it: the layout follows from the module's graph")  # fmt: skip
