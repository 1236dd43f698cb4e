"""Clipping by norm over all ranks; torch's own is right or raises."""

import math
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from moe import sharding
from moe.sharding.parameters import is_cut
from tests.grid import one_seed_each
from tests.parity.gloo_ranks import Pools
from tests.sharding.odd import odd, random_hints
from tests.sharding.on_ranks import cores

NORM_TYPES = (1.0, 2.0, 3.5, math.inf)
MESHES: tuple[dict[str, int], ...] = ({"a": 2}, {"a": 4}, {"a": 2, "b": 2})


def _applied(mesh: dict[str, int], seed: int) -> tuple[nn.Module, sharding.Applied, Any]:
    module, batch = odd(seed)
    hints = random_hints(module, mesh, random.Random(seed))
    plan = sharding.plan(module, batch, cores(math.prod(mesh.values())), hints, mesh=mesh)
    return module, sharding.apply(module, plan), batch


def _gradients_differ(module: nn.Module, applied: sharding.Applied) -> list[str]:
    wrong = []
    for name, shard in applied.shards().items():
        if (whole := dict(module.named_parameters()).get(name)) is None or whole.grad is None:
            continue
        cut = tuple(slice(at, at + n) for at, n in zip(shard.offsets, shard.part.shape, strict=True))
        if not torch.allclose(applied.get_parameter(name).grad, whole.grad[cut], rtol=1e-12, atol=1e-14):
            wrong.append(name)
    return wrong


def clipped_on_ranks(mesh: dict[str, int], seed: int) -> tuple[list[str], list[float]]:
    """(what differs from torch's on one device, norms)."""
    module, applied, batch = _applied(mesh, seed)
    wrong, norms = [], []
    for norm_type in NORM_TYPES:
        for share in (0.3, 3.0):  # of the norm: the second leaves gradients as they are
            for each in (module, applied):
                each.zero_grad()
                each(*batch).backward()
            limit = share * float(
                get_total_norm([p.grad for p in module.parameters() if p.grad is not None], norm_type)
            )
            expected = clip_grad_norm_(module.parameters(), limit, norm_type)
            found = sharding.clip_grad_norm_(applied.parameters(), limit, norm_type)
            norms.append(float(found))
            if found.dtype != expected.dtype or not torch.allclose(found, expected, rtol=1e-12, atol=0):
                wrong.append(f"norm of order {norm_type}: {found} for {expected}")
            wrong += [f"order {norm_type}: {name}" for name in _gradients_differ(module, applied)]
    sharding.close(applied)
    return wrong, norms


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "seed"), one_seed_each(MESHES), ids=str)
def test_norms_are_those_of_one_device_and_the_same_on_all_ranks(
    ranks: Pools, mesh: dict[str, int], seed: int
):
    found = ranks[math.prod(mesh.values())].run(clipped_on_ranks, mesh, seed)
    assert [wrong for wrong, _ in found] == [[]] * len(found)
    assert len({tuple(norms) for _, norms in found}) == 1


def not_finite_on_ranks() -> list[str]:
    """What is said of one value that is not finite, on the last rank alone."""
    _, applied, batch = _applied({"a": 2}, 0)
    said = []
    for value in (math.nan, math.inf):
        for norm_type in NORM_TYPES:
            applied.zero_grad()
            applied(*batch).backward()
            cut = [
                each
                for each in applied.parameters()
                if is_cut(each) and each.numel() and each.grad is not None
            ]
            if dist.get_rank() == 1:
                cut[0].grad.view(-1)[0] = value
            before = cut[-1].grad.clone()
            try:
                sharding.clip_grad_norm_(applied.parameters(), 1.0, norm_type, error_if_nonfinite=True)
            except RuntimeError as error:
                said.append(f"{error}")
            assert torch.equal(cut[-1].grad, before)
            total = sharding.clip_grad_norm_(applied.parameters(), 1.0, norm_type)
            said.append(str(float(total)))
    sharding.close(applied)
    return said


def test_a_norm_that_is_not_finite_is_the_same_on_all_ranks_and_refused_where_asked(ranks: Pools):
    first, second = ranks[2].run(not_finite_on_ranks)
    assert first == second
    assert len(first) == 2 * 2 * len(NORM_TYPES)
    assert all("is not finite" in words for words in first[::2])
    assert first[1::2] == ["nan"] * len(NORM_TYPES) + ["inf"] * len(NORM_TYPES)


def by_torch_on_ranks(cut: bool) -> list[str]:
    """What torch's own functions did wrong, or said."""
    world = dist.get_world_size()
    module, batch = odd()
    hints = {"*.weight": sharding.Split(0) if cut else sharding.Replicate(), "*.bias": sharding.Replicate(),
             "sh*": sharding.Replicate()}  # fmt: skip
    plan = sharding.plan(module, batch, cores(world), hints, mesh={"all": world})
    applied = sharding.apply(module, plan)
    both = (module, applied)

    def backward() -> None:
        for each in both:
            each.zero_grad()
            each(*batch).backward()

    def gradients(each: nn.Module) -> list[torch.Tensor]:
        return [p.grad for p in each.parameters() if p.grad is not None]

    said = []
    backward()
    for what in (
        lambda each: clip_grad_norm_(each.parameters(), 0.1),
        lambda each: get_total_norm(gradients(each)),
        lambda each: get_total_norm([g.detach().view(-1) for g in gradients(each)], foreach=False),
    ):
        expected = what(module)
        try:
            found = what(applied)
        except RuntimeError as error:
            said.append(str(error))
            continue
        if not torch.allclose(found, expected, rtol=1e-12):
            said.append(f"{found} for {expected}")
    backward()
    total = sharding.clip_grad_norm_(applied.parameters(), math.inf)
    for each in both:
        clip_grads_with_norm_(each.parameters(), 0.05, total)
    said += _gradients_differ(module, applied)
    backward()
    for each in both:
        clip_grad_value_(each.parameters(), 0.01)
    said += _gradients_differ(module, applied)
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    if not float(get_total_norm([p.grad for p in other.parameters()])) > 0:
        said.append("another module's norm")
    for parameters in (other.parameters(), [*other.parameters(), *applied.parameters()]):
        try:
            sharding.clip_grad_norm_(parameters, 1.0)
        except ValueError:
            continue
        said.append("clipped another module's parameters")
    sharding.close(applied)
    return said


def test_torchs_own_norms_of_parts_are_refused(ranks: Pools):
    for said in ranks[2].run(by_torch_on_ranks, True):
        assert len(said) == 3
        assert all("use moe.sharding.clip_grad_norm_" in words for words in said)


def test_torchs_own_norms_of_whole_parameters_are_right(ranks: Pools):
    assert ranks[2].run(by_torch_on_ranks, False) == [[], []]


@pytest.mark.parametrize("norm_type", [0.0, -math.inf])
def test_norms_that_nothing_is_clipped_by_are_refused(norm_type: float):
    with pytest.raises(ValueError, match="must be above 0"):
        sharding.clip_grad_norm_([], 1.0, norm_type)


def test_nothing_to_clip_has_no_norm():
    assert float(sharding.clip_grad_norm_([], 1.0)) == 0.0
