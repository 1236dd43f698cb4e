"""Adafactor against a loop over experts, written from the paper, and its independence of the layout."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moe.parallel import Layout, ParameterShard, local_parameters
from moe.parallel.parameters import Splits
from moe.spec import AdafactorSpec, AdamWSpec
from moe.train.optimizer.adafactor import Adafactor, slot_part
from moe.train.optimizer.build import build_optimizer, moments, set_learning_rate, set_step

SPEC = AdafactorSpec(
    name="adafactor", peak_lr=0.05, beta2=0.9, clip_threshold=0.7, weight_decay=0.1, decay_vectors=True
)


def reference_update(spec, weights, grads, lr):
    """Reference update of a matrix or vector through all its gradients."""
    rows, columns, moments = 0.0, 0.0, 0.0
    for step, grad in enumerate(grads, start=1):
        beta2 = spec.beta2 * (1 - spec.beta2 ** (step - 1)) / (1 - spec.beta2**step)
        square = grad**2 + spec.eps
        if grad.ndim == 2:
            rows = beta2 * rows + (1 - beta2) * square.mean(1)
            columns = beta2 * columns + (1 - beta2) * square.mean(0)
            second = torch.outer(rows, columns) / rows.mean()
        else:
            moments = beta2 * moments + (1 - beta2) * square
            second = moments
        update = grad / second.sqrt()
        rms = math.sqrt(float((update**2).mean()))
        weights = weights - lr * spec.weight_decay * weights - lr * update / max(1.0, rms / spec.clip_threshold)
    return weights


def random(*shape, seed=0, steps=None):
    generator = torch.Generator().manual_seed(seed)
    shape = shape if steps is None else (steps, *shape)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def train(dense, experts, grads, lr=0.05):
    """Parameters after one step per gradient."""
    parameters = nn.ParameterDict({name: value.clone() for name, value in {**dense, **experts}.items()})
    for name, parameter in parameters.items():
        parameter.part = ParameterShard(parameter.shape, of_experts=name in experts)
    optimizer = Adafactor(SPEC, local_parameters(parameters), Layout.single())
    set_learning_rate(optimizer, lr)
    for step in range(len(next(iter(grads.values())))):
        for name, parameter in parameters.items():
            parameter.grad = grads[name][step].clone()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def test_equals_a_loop_over_experts():
    dense = {"matrix": random(5, 7, seed=1), "vector": random(6, seed=2), "scalar": random(seed=7)}
    experts = {"experts": random(3, 4, 5, seed=3)}
    grads = {
        "matrix": random(5, 7, seed=4, steps=6) * 3,
        "vector": random(6, seed=5, steps=6) / 10,
        "scalar": random(seed=8, steps=6),
        "experts": random(3, 4, 5, seed=6, steps=6) * torch.tensor([1.0, 100.0, 1e-6])[:, None, None],
    }
    grads["experts"][2:4, 1] = 0  # an expert that no token reached for two steps
    weights = train(dense, experts, grads)
    for name in dense:
        torch.testing.assert_close(weights[name], reference_update(SPEC, dense[name], grads[name], 0.05))
    for expert in range(3):
        expected = reference_update(SPEC, experts["experts"][expert], grads["experts"][:, expert], 0.05)
        torch.testing.assert_close(weights["experts"][expert], expected)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.integers(0, 1000), st.booleans())
def test_an_expert_learns_the_same_wherever_and_beside_whomever_it_lives(experts, rows, columns, seed, vectors):
    shape = (rows,) if vectors else (rows, columns)
    weights, grads = random(experts, *shape, seed=seed), random(experts, *shape, seed=seed + 1, steps=3)
    joint = train({}, {"w": weights}, {"w": grads})["w"]
    for expert in range(experts):
        single = train({}, {"w": weights[expert : expert + 1]}, {"w": grads[:, expert : expert + 1]})["w"]
        torch.testing.assert_close(joint[expert : expert + 1], single)


def test_a_loud_expert_does_not_hold_back_a_quiet_one_and_updates_are_clipped():
    weights, grads = torch.zeros(2, 4, 4, dtype=torch.float64), random(2, 4, 4, seed=1, steps=1)
    louder = grads * torch.tensor([1.0, 1e4])[:, None, None]
    torch.testing.assert_close(
        train({}, {"w": weights}, {"w": louder})["w"][0], train({}, {"w": weights}, {"w": grads})["w"][0]
    )
    grads = random(1, 8, 8, seed=3, steps=1)
    grads[0, 0, 0, 0] = 1e6
    update = train({}, {"w": torch.zeros(1, 8, 8, dtype=torch.float64)}, {"w": grads}, lr=1.0)["w"]
    assert update.square().mean().sqrt() <= SPEC.clip_threshold * (1 + 1e-9)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Parameter(torch.ones(3, 4))
        self.scale = nn.Parameter(torch.ones(5))
        self.experts = nn.Parameter(torch.ones(2, 3, 4))
        for name, parameter in self.named_parameters():
            parameter.part = ParameterShard(parameter.shape, of_experts=name == "experts")


def shapes(spec):
    parameters = local_parameters(Tiny())
    optimizer = build_optimizer(spec, parameters, Layout.single())
    return {(name, slot): tuple(tensor.shape) for name, slot, tensor, _ in moments(optimizer, parameters)}, optimizer


def test_state_is_there_before_the_first_step_with_experts_in_front():
    state_shapes, _ = shapes(SPEC)
    assert state_shapes == {
        ("dense", "rows"): (3,), ("dense", "columns"): (4,), ("scale", "moments"): (5,),
        ("experts", "rows"): (2, 3), ("experts", "columns"): (2, 4),
    }  # fmt: skip
    state_shapes, optimizer = shapes(AdamWSpec(name="adamw"))
    assert state_shapes[("experts", "exp_avg")] == state_shapes[("experts", "exp_avg_sq")] == (2, 3, 4)
    set_step(optimizer, 7)
    assert {float(state["step"]) for state in optimizer.state.values()} == {7.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_moves_as_its_definition_says(dtype):
    model = Tiny().to(dtype)
    spec = AdamWSpec(name="adamw", weight_decay=0.1, decay_vectors=True)
    optimizer = build_optimizer(spec, local_parameters(model), Layout.single())
    set_learning_rate(optimizer, 0.01)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    optimizer.step()
    # The first step moves every entry by the learning rate, towards zero by the decay.
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 1 - 0.01 * 0.1 - 0.01))


@pytest.mark.parametrize(
    ("slot", "of_experts", "splits", "expected"),
    [
        ("rows", True, (("expert", 0), ("expert_tensor", 2)), ((4, 6), (("expert", 0),))),
        ("rows", True, (("expert", 0), ("expert_tensor", 1)), ((4, 6), (("expert", 0), ("expert_tensor", 1)))),
        ("columns", True, (("expert", 0), ("expert_tensor", 2)), ((4, 8), (("expert", 0), ("expert_tensor", 1)))),
        ("columns", True, (("expert", 0), ("expert_tensor", 1)), ((4, 8), (("expert", 0),))),
        ("moments", True, (("expert", 0), ("expert_tensor", 1)), ((4, 6, 8), (("expert", 0), ("expert_tensor", 1)))),
        ("rows", False, (("fsdp", 0), ("tensor", 1)), ((6,), (("fsdp", 0),))),
        ("columns", False, (("fsdp", 0), ("tensor", 1)), ((8,), (("tensor", 0),))),
    ],
)
def test_statistics_are_sharded_as_the_dimensions_that_they_keep(
    slot: str, of_experts: bool, splits: Splits, expected: tuple[tuple[int, ...], Splits]
) -> None:
    shape = (4, 6, 8) if of_experts else (6, 8)
    part = slot_part(slot, ParameterShard(torch.Size(shape), splits, of_experts))
    assert (part.shape, part.splits) == expected
    assert part.of_experts == of_experts
