"""What the planner says that the fullest rank holds is what it holds, under every layout of the parity table."""

import re
from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe.parallel import Layout, LocalParameter, local_parameters, reduce_gradients
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
    OptimizerSpec,
    TranslationModelSpec,
    model_spec,
    presets,
)
from moe.tasks.build import build_model
from moe.train.optimizer.build import build_optimizer, moments
from tests.grid import every, numbered
from tests.parity.combinations import LAYOUTS, ROUTERS, model_of
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS, language_model
from tests.parity.trajectory import Degrees

OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw": AdamWSpec(name="adamw", peak_lr=1e-3),
    "adafactor": AdafactorSpec(name="adafactor", peak_lr=1e-3),
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
Model = TranslationModelSpec | LanguageModelSpec
EVERY_LAYOUT = [each for family in LAYOUTS.values() for each in family]
CASES = [
    *((name, each) for name in ("even", "uneven") for each in EVERY_LAYOUT),
    *((list(ATTENTIONS)[number % len(ATTENTIONS)], each) for number, each in enumerate(EVERY_LAYOUT)),
]
"""Each kind of attention under a quarter of the layouts."""


def model_called(name: str) -> Model:
    if name in ATTENTIONS:
        return language_model(name, **ROUTERS["gated experts with biases, shared ones with a gate"])
    return EVERY_KIND if name == "even" else UNEVEN


def build_and_remember(model: Model, layout: Layout, optimizer: str) -> tuple[list[LocalParameter], list[torch.Tensor]]:
    """(parameters of this rank, what its optimizer remembers)"""
    parameters = local_parameters(build_model(model, layout))
    built = build_optimizer(OPTIMIZERS[optimizer], parameters, layout)
    return parameters, [tensor for _, _, tensor, _ in moments(built, parameters)]


def close(layout: Layout) -> None:
    if layout.world_size > 1:
        dist.barrier()  # all are connected: only then may one let go
    layout.close()


def parts_here(model: Model, plan: Plan, optimizer: str) -> tuple[Counter[tuple[str, tuple[int, ...]]], int]:
    """(how many parameters of each name and shape this rank has, elements that its optimizer remembers)."""
    layout = Layout.build(plan)
    parameters, remembered = build_and_remember(model, layout, optimizer)
    shapes = Counter(
        (re.sub(r"^((en|de)coder|layers)\.\d+\.", "", each.name), tuple(each.local.shape)) for each in parameters
    )
    close(layout)
    return shapes, sum(tensor.numel() for tensor in remembered)


def run_on(ranks: Pools, degrees: Degrees, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return ranks[degrees.workers].run(function, *arguments) if degrees.workers > 1 else [function(*arguments)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", every(CASES, 3))
def test_the_fullest_rank_holds_what_was_predicted(ranks: Pools, case: tuple[str, Degrees]) -> None:
    name, degrees = case
    plan, model = degrees.plan(8), model_called(name)
    for optimizer in OPTIMIZERS:
        each = run_on(ranks, degrees, parts_here, model, plan, optimizer)
        predicted: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for unit in units(model, OURS):
            for weight in unit.weights:
                predicted[weight.name, weight.local_shape(plan.degrees.shards)] += 1
        shapes, remembered = each[0]  # cut up unevenly, the first ranks have more
        assert shapes == predicted
        state = state_of(model, plan.degrees, OPTIMIZERS[optimizer])
        elements = [sum(prod(shape) * count for (_, shape), count in of_rank.items()) for of_rank, _ in each]
        assert max(elements) == elements[0] == state.stored.total
        assert max(number for _, number in each) == remembered == state.optimizer


def bytes_here(model: Model, plan: Plan) -> dict[str, int]:
    """Bytes that this rank has of parameters, of gradients and of what its optimizer remembers."""
    layout = Layout.build(plan)
    parameters, remembered = build_and_remember(model, layout, "adamw")
    reduce_gradients(parameters, layout)
    found = {
        "parameters": sum(each.local.nbytes for each in parameters),
        "gradients": sum(each.local.grad.nbytes for each in parameters if each.local.grad is not None),
        "optimizer": sum(tensor.nbytes for tensor in remembered),
    }
    close(layout)
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("number", numbered(EVERY_LAYOUT, 3))
def test_of_adapters_it_has_the_bytes_that_were_predicted(ranks: Pools, number: int) -> None:
    """To the byte, whatever the base is kept in; gradients and moments of what is trained alone."""
    degrees, name = EVERY_LAYOUT[number], list(ATTENTIONS)[number % len(ATTENTIONS)]
    base = ("float32", "bfloat16", "int8", "nf4")[(number + number // 4) % 4]
    plain = language_model(name, **ROUTERS["gated experts with biases, shared ones with a gate"])
    spec = JobSpec.parse({
        "model": {**plain.model_dump(), "from": "/models/base"}, "adapter": {"rank": 2, "base": base},
        "data": {"corpus": "packages", "max_tokens": 64}, "train": {"num_steps": 1, "batch_tokens": 64 * 8},
    })  # fmt: skip
    plan, model = degrees.plan(8), spec.model
    assert isinstance(model, LanguageModelSpec)
    each = run_on(ranks, degrees, bytes_here, model, plan)
    cluster = Cluster(num_nodes=1, devices_per_node=4, device="h100")
    memory = MemoryModel(spec, cluster, OURS).estimate(Candidate(plan.degrees, plan.options))
    trained = sum(each.numel for each in model.parameters() if not each.frozen)
    for kind in ("parameters", "gradients", "optimizer"):
        assert max(of_rank[kind] for of_rank in each) == getattr(memory, kind), kind
    if degrees.workers == 1:
        assert (memory.gradients, memory.optimizer) == (4 * trained, 8 * trained)


def test_a_model_has_as_many_weights_as_its_units() -> None:
    for model in (
        *map(model_called, ("even", "uneven", *ATTENTIONS)),
        *(model_spec({"preset": name}) for name in presets.names()),
    ):
        assert model.num_parameters() == sum(weight.numel for unit in units(model, OURS) for weight in unit.weights)
