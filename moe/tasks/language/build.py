"""Build a language model from its spec, under a layout."""

from collections.abc import Sequence
from functools import partial

import torch

from moe.parallel import Layout
from moe.spec import LanguageModelSpec
from moe.tasks.language.model import LanguageModel
from moe.tasks.sharded_model import build_sharded


def build_model(
    spec: LanguageModelSpec,
    layout: Layout | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    freeze: Sequence[str] = (),
) -> LanguageModel:
    """Build the model (this rank's part under `layout`) with initial weights, computing in `dtype` (default float32).

    Parameters that match a pattern of `freeze` get no gradients. Raises SpecError, as `build_sharded` does.
    """
    layers = {f"layers.{layer}": f"layer {layer}" for layer in range(spec.num_layers)}
    return build_sharded(
        partial(LanguageModel, spec), spec, layers, layout, seed=seed, dtype=dtype, freeze=freeze
    )
