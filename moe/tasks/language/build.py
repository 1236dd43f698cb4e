"""From a spec to a language model, laid out."""

from collections.abc import Sequence

import torch

from moe.parallel import Layout, apply, declare, freeze_parameters
from moe.plan import fit_problems
from moe.plan.degrees import Shards
from moe.plan.placement import placements_of
from moe.spec import LanguageModelSpec, SpecError
from moe.tasks.language.model import LanguageModel


def build_model(
    spec: LanguageModelSpec,
    layout: Layout | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    freeze: Sequence[str] = (),
) -> LanguageModel:
    """The model with its initial weights, computing in `dtype` (float32): this rank's part under `layout`, all of it
    without.

    Weights are keyed by (seed, parameter name, element), so every layout starts from the same model. Those whose names
    match a pattern of `freeze` get no gradients. Raises SpecError
    where the layout's degrees do not divide what they are to divide.
    """
    layout, dtype = layout or Layout.single(), dtype or torch.float32
    if problems := fit_problems(spec, layout.degrees):
        raise SpecError(problems)
    with torch.device("meta"):
        model = LanguageModel(spec, dtype)
        # Under bfloat16 the weights stay float32 and are narrowed where they are used.
        declare(model, spec.parameters(), torch.promote_types(dtype, torch.float32))
    freeze_parameters(model, freeze)
    layers = {f"layers.{layer}": f"layer {layer}" for layer in range(spec.num_layers)}
    placements = layout.placements
    if placements is None:
        placements = placements_of(spec, Shards.of(layout.degrees))
    return apply(model, placements, layout, {**layers, "": "embeddings"}, seed)
