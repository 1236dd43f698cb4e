"""Build a sharded model of this library from its spec."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from moe.parallel import Layout, apply, declare, freeze_parameters
from moe.parallel.stages import cut, mark_tied_tables
from moe.plan import fit_problems, stage_problems
from moe.plan.degrees import ShardCounts
from moe.plan.placement import Placements, placements_of
from moe.spec import LanguageModelSpec, SpecError, TranslationModelSpec

Model = TypeVar("Model", bound=nn.Module)


def build_sharded(
    make: Callable[[Any, torch.dtype], Model],
    spec: TranslationModelSpec | LanguageModelSpec,
    layout: Layout | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    freeze: Sequence[str] = (),
) -> Model:
    """Build the model (this rank's part under `layout`) with `make(spec, dtype)` (default float32) and initial weights.

    Weights are drawn by (seed, parameter name, element): every layout starts from the same model. In a pipeline it has
    the parts of this rank's stages, with the names of the whole model. Layers are FSDP units. Parameters that match a
    pattern of `freeze` get no gradients. Raises SpecError if the degrees do not divide the model's dimensions, or the
    stages its layers.
    """
    layout, dtype = layout or Layout.single(), dtype or torch.float32
    problems = fit_problems(spec, layout.degrees, layout.context_exchange)
    if layout.degree("pipeline") > 1:
        problems += stage_problems(spec, layout.degree("pipeline"), layout.virtual_stages, layout.stages)
    if problems:
        raise SpecError(problems)
    with torch.device("meta"):
        model = make(spec, dtype)
        # Under bfloat16, weights stay float32 and are cast where used.
        declare(model, spec.parameters(), torch.promote_types(dtype, torch.float32))
    freeze_parameters(model, freeze)
    placements = layout.placements
    if placements is None:
        placements = placements_of(spec, ShardCounts.from_degrees(layout.degrees))
    layers = {path: f"layer {layer}" for layer, (path, _) in enumerate(spec.blocks(), -1) if path}
    if layout.degree("pipeline") > 1:
        Placements(placements).check({name: parameter.shape for name, parameter in model.named_parameters()})
        cut(model, spec.num_layers, layout)
        paths = {path for path, _ in model.named_modules()}
        layers = {path: label for path, label in layers.items() if path in paths}
    apply(model, placements, layout, {**layers, "": "embeddings"}, seed)
    mark_tied_tables(model, layout)
    return model
