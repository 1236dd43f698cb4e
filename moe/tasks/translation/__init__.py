"""Models of the spec's kinds, and decoding."""

import torch

from moe.parallel import Layout, apply, declare, held_parameters
from moe.plan import fit_problems
from moe.plan.placement import weights_of
from moe.spec import ModelSpec, Problem, SpecError, TranslationModelSpec
from moe.tasks.translation.context import BatchContext
from moe.tasks.translation.greedy import greedy_decode
from moe.tasks.translation.model import DecodingState, TranslationModel


def build_model(
    spec: ModelSpec,
    layout: Layout | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> TranslationModel:
    """The model with its initial weights: this rank's part under `layout`, all of it without.

    Weights are keyed by (seed, parameter name, element), so every layout starts from the same model. Raises SpecError
    where the layout's degrees do not divide what they are to divide, and for a language model, which is none yet.
    """
    if not isinstance(spec, TranslationModelSpec):
        raise SpecError(
            Problem("kind", spec.kind, "can be planned, but not be built yet", "use a translation model")
        )
    layout = layout or Layout.single()
    if problems := fit_problems(spec, layout.degrees):
        raise SpecError(problems)
    with torch.device("meta"):
        model = TranslationModel(spec, dtype)
        # Under bfloat16 the weights stay float32 and are narrowed where they are used.
        declare(model, spec.parameters(), torch.promote_types(dtype, torch.float32))
    layers = {path: f"layer {layer}" for layer, (path, _) in enumerate(spec.blocks(), -1) if path}
    apply(model, weights_of(spec.parameters()), layout, {**layers, "": "embeddings"}, seed)
    model.held = held_parameters(model)
    return model


__all__ = ["BatchContext", "DecodingState", "TranslationModel", "build_model", "greedy_decode"]
