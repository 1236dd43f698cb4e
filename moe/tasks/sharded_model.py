"""From a spec to a model of this library, laid out."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from moe.parallel import Layout, apply, declare, freeze_parameters
from moe.plan import fit_problems
from moe.plan.degrees import ShardCounts
from moe.plan.placement import placements_of
from moe.spec import LanguageModelSpec, SpecError, TranslationModelSpec

Model = TypeVar("Model", bound=nn.Module)


def build_sharded(
    make: Callable[[torch.dtype], Model],
    spec: TranslationModelSpec | LanguageModelSpec,
    blocks: Mapping[str, str],
    layout: Layout | None,
    *,
    seed: int,
    dtype: torch.dtype | None,
    freeze: Sequence[str],
) -> Model:
    """Model that `make` makes of the dtype that it computes in (float32), with its initial weights: this rank's part
    under `layout`, all of it without.

    `blocks` are the paths of what FSDP gathers as one, each with its name. Weights are keyed by (seed, parameter name,
    element), so every layout starts from the same model. Those whose names match a pattern of `freeze` get no
    gradients. Raises SpecError where the layout's degrees do not divide what they are to divide.
    """
    layout, dtype = layout or Layout.single(), dtype or torch.float32
    if problems := fit_problems(spec, layout.degrees):
        raise SpecError(problems)
    with torch.device("meta"):
        model = make(dtype)
        # Under bfloat16 the weights stay float32 and are narrowed where they are used.
        declare(model, spec.parameters(), torch.promote_types(dtype, torch.float32))
    freeze_parameters(model, freeze)
    placements = layout.placements
    if placements is None:
        placements = placements_of(spec, ShardCounts.from_degrees(layout.degrees))
    return apply(model, placements, layout, {**blocks, "": "embeddings"}, seed)
