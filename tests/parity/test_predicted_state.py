"""The planner predicts what the fullest rank holds, under every layout of the parity table."""

import re
from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe.parallel import GradientReduction, Layout, LocalParameter, OptimizerShards, local_parameters
from moe.plan import Cluster, Plan
from moe.plan.candidate import Candidate
from moe.plan.cost.memory import MemoryModel
from moe.plan.cost.state import state_of
from moe.plan.cost.units import units
from moe.plan.profile import OURS
from moe.spec import (
    AdafactorSpec,
    AdamWSpec,
    JobSpec,
    LanguageModelSpec,
    MuonSpec,
    OptimizerSpec,
    TranslationModelSpec,
    model_spec,
    presets,
)
from moe.tasks.build import build_model
from moe.train.optimizer.build import build_optimizer, moments
from tests.grid import index_params, item_params
from tests.parity.combinations import LAYOUTS, ROUTERS, model_of, with_possible_exchange
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS, language_model, with_frozen_indexer
from tests.parity.trajectory import Degrees

OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw": AdamWSpec(name="adamw", peak_lr=1e-3),
    "adafactor": AdafactorSpec(name="adafactor", peak_lr=1e-3),
    "muon": MuonSpec(name="muon", peak_lr=1e-3),
    "8-bit adamw": AdamWSpec(name="adamw", peak_lr=1e-3, moments="8bit"),
}
EVERY_KIND = model_of(**ROUTERS["gated experts with biases, shared ones with a gate"])
_DIMENSIONS = EVERY_KIND.model_dump(mode="json")
UNEVEN = TranslationModelSpec.model_validate(
    {
        **_DIMENSIONS, "model_dim": 18, "num_encoder_layers": 3, "share_vocabulary": False,
        "source_vocab_size": 301, "target_vocab_size": 302,
        "moe": {**_DIMENSIONS["moe"], "model_dim": 18, "expert_bias": False},
    }
)  # fmt: skip
"""18 channels on 4 ranks."""
WIDE = TranslationModelSpec.model_validate(
    {
        **_DIMENSIONS, "model_dim": 64, "ffn_dim": 128, "source_vocab_size": 301, "target_vocab_size": 301,
        "moe": {**_DIMENSIONS["moe"], "model_dim": 64, "hidden_dim": 96},
    }
)  # fmt: skip
"""Matrices with 8-bit moments, whose blocks several layouts cut."""
Model = TranslationModelSpec | LanguageModelSpec
EVERY_LAYOUT = [degrees for family in LAYOUTS.values() for degrees in family if degrees.pipeline == 1]
"""Without stages, which hold different layers (`test_layout_memory`)."""
CASES = [
    *((name, degrees) for name in ("even", "uneven", "wide") for degrees in EVERY_LAYOUT),
    *((list(ATTENTIONS)[number % len(ATTENTIONS)], degrees) for number, degrees in enumerate(EVERY_LAYOUT)),
]
"""Each kind of attention under a quarter of the layouts."""


def model_called(name: str) -> Model:
    if name in ATTENTIONS:
        return language_model(name, **ROUTERS["gated experts with biases, shared ones with a gate"])
    return {"even": EVERY_KIND, "uneven": UNEVEN, "wide": WIDE}[name]


def build_with_moments(model: Model, layout: Layout, optimizer: str) -> tuple[list[LocalParameter], list[torch.Tensor]]:
    """(parameters of this rank, moments of its optimizer)"""
    parameters = local_parameters(build_model(model, layout))
    updated = OptimizerShards(parameters, layout).parameters
    built_optimizer = build_optimizer(OPTIMIZERS[optimizer], updated, layout)
    return parameters, [tensor for _, _, tensor, _ in moments(built_optimizer, updated)]


def close(layout: Layout) -> None:
    if layout.world_size > 1:
        dist.barrier()  # a rank may close its groups only when all are connected
    layout.close()


def local_parts(model: Model, plan: Plan, optimizer: str) -> tuple[Counter[tuple[str, tuple[int, ...]]], int]:
    """(number of this rank's parameters by name and shape, number of elements of its optimizer's moments, or of bytes
    of 8-bit ones)"""
    layout = Layout.build(plan)
    parameters, moment_tensors = build_with_moments(model, layout, optimizer)
    shapes = Counter(
        (re.sub(r"^((en|de)coder|layers)\.\d+\.", "", parameter.name), tuple(parameter.local.shape))
        for parameter in parameters
    )
    close(layout)
    is_quantized = optimizer == "8-bit adamw"
    return shapes, sum(tensor.nbytes if is_quantized else tensor.numel() for tensor in moment_tensors)


def run_on(ranks: Pools, degrees: Degrees, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return ranks[degrees.workers].run(function, *arguments) if degrees.workers > 1 else [function(*arguments)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", item_params(CASES, 3))
def test_the_fullest_rank_holds_what_was_predicted(ranks: Pools, case: tuple[str, Degrees]) -> None:
    name, degrees = case
    model = model_called(name)
    plan = with_possible_exchange(degrees, model).plan(8)
    for optimizer in OPTIMIZERS:
        answers = run_on(ranks, degrees, local_parts, model, plan, optimizer)
        predicted_shapes: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for unit in units(model, OURS):
            for weight in unit.weights:
                shape_on = weight.local_shape if plan.candidate.gathers else weight.unsharded_shape
                predicted_shapes[weight.name, shape_on(plan.degrees.shards)] += 1
        shapes, num_moments = answers[0]  # the first ranks have more of an uneven split
        assert shapes == predicted_shapes
        state = state_of(model, plan.degrees, OPTIMIZERS[optimizer])
        elements = [sum(prod(shape) * count for (_, shape), count in of_rank.items()) for of_rank, _ in answers]
        predicted = state.stored if plan.options.sharding == "parameters" else state.used
        assert max(elements) == elements[0] == predicted.total
        assert max(number for _, number in answers) == num_moments == state.optimizer


def local_bytes(model: Model, plan: Plan) -> dict[str, int]:
    """Bytes of this rank's parameters, of its gradients and of its optimizer's moments."""
    layout = Layout.build(plan)
    parameters, moment_tensors = build_with_moments(model, layout, "adamw")
    shards = OptimizerShards(parameters, layout)
    reduction = GradientReduction(parameters, layout, shards.sharded)
    if shards.sharded:  # between two micro-batches
        with reduction.overlapping_backward(is_last=False):
            trained = (parameter.parameter for parameter in parameters if parameter.parameter.requires_grad)
            torch.stack([parameter.sum() for parameter in trained]).sum().backward()
    else:
        reduction.finish()
    gradients = [*shards.parameters, *(shard.whole for shard in shards.sharded)]
    sizes = {
        "parameters": sum(parameter.local.nbytes for parameter in parameters),
        "gradients": sum(parameter.local.grad.nbytes for parameter in gradients if parameter.local.grad is not None),
        "optimizer": sum(tensor.nbytes for tensor in moment_tensors),
    }
    close(layout)
    return sizes


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", index_params(EVERY_LAYOUT, 3))
def test_of_adapters_it_has_the_bytes_that_were_predicted(ranks: Pools, number: int) -> None:
    """To the byte, for any form of the base; only trained parameters have gradients and moments."""
    degrees, name = EVERY_LAYOUT[number], list(ATTENTIONS)[number % len(ATTENTIONS)]
    base = ("float32", "bfloat16", "int8", "nf4")[(number + number // 4) % 4]
    plain = with_frozen_indexer(language_model(name, **ROUTERS["gated experts with biases, shared ones with a gate"]))
    spec = JobSpec.parse({
        "model": {**plain.model_dump(), "from": "/models/base"}, "adapter": {"rank": 2, "base": base},
        "data": {"corpus": "packages", "max_tokens": 64}, "train": {"num_steps": 1, "batch_tokens": 64 * 8},
    })  # fmt: skip
    model = spec.model
    assert isinstance(model, LanguageModelSpec)
    plan = with_possible_exchange(degrees, model).plan(8)
    answers = run_on(ranks, degrees, local_bytes, model, plan)
    cluster = Cluster(num_nodes=1, devices_per_node=4, device="h100")
    memory = MemoryModel(spec, cluster, OURS).estimate(Candidate(plan.degrees, plan.options))
    num_trained = sum(parameter.numel for parameter in model.parameters() if not parameter.frozen)
    for kind in ("parameters", "gradients", "optimizer"):
        assert max(of_rank[kind] for of_rank in answers) == getattr(memory, kind), kind
    if degrees.workers == 1:
        assert (memory.gradients, memory.optimizer) == (4 * num_trained, 8 * num_trained)


def test_a_model_has_as_many_weights_as_its_units() -> None:
    for model in (
        *map(model_called, ("even", "uneven", *ATTENTIONS)),
        *(model_spec({"preset": name}) for name in presets.names()),
    ):
        assert model.num_parameters() == sum(weight.numel for unit in units(model, OURS) for weight in unit.weights)
