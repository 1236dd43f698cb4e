"""Build a translation model from its spec, under a layout."""

from collections.abc import Sequence
from functools import partial

import torch

from moe.parallel import Layout
from moe.spec import TranslationModelSpec
from moe.tasks.sharded_model import build_sharded
from moe.tasks.translation.model import TranslationModel


def build_model(
    spec: TranslationModelSpec,
    layout: Layout | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    freeze: Sequence[str] = (),
) -> TranslationModel:
    """Build the model (this rank's part under `layout`) with initial weights, computing in `dtype` (default float32).

    Parameters that match a pattern of `freeze` get no gradients. Raises SpecError, as `build_sharded` does.
    """
    layers = {path: f"layer {layer}" for layer, (path, _) in enumerate(spec.blocks(), -1) if path}
    return build_sharded(
        partial(TranslationModel, spec), spec, layers, layout, seed=seed, dtype=dtype, freeze=freeze
    )
