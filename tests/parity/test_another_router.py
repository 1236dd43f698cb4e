"""A router from outside: a spec class, a router class, a line in each registry; nothing else knows of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pytest
import torch
from torch import Tensor

from moe import routing
from moe.routing import Router, Routing, RoutingState, TokenContext
from moe.routing.selection import admit_choices
from moe.spec import JobSpec, MoESpec, json_schema, routers
from moe.spec.base import Count
from moe.spec.routers import TokenChoiceSpec
from tests.parity.combinations import assert_ranks_same, model_of, train_of
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees, Shape, run
from tests.refusals import expect_problem, expect_problems
from tests.unit.test_spec import job


class RoundRobinSpec(TokenChoiceSpec):
    """Experts in turn, independent of a token's content (as in hash layers, arXiv 2106.04426)."""

    router: Literal["round_robin"] = "round_robin"
    stride: Count = 1
    """Distance between the two experts of a token."""

    def experts_per_token(self, num_experts: int) -> int:
        return min(2, num_experts)


class RoundRobin(Router[RoundRobinSpec]):
    """By a token's position; both experts weigh the same."""

    def __call__(self, logits: Tensor, tokens: TokenContext, layer: int, state: RoutingState) -> Routing:
        num_experts = logits.shape[-1]
        turn_K = torch.arange(self.spec.experts_per_token(num_experts), device=logits.device)
        expert_GSK = (tokens.keys(logits)[..., None] + self.spec.stride * turn_K) % num_experts
        weight_GSK = torch.full_like(expert_GSK, 1 / len(turn_K), dtype=logits.dtype)
        no_loss = (logits.new_zeros(()), tokens.real(logits).sum())
        return admit_choices(self.spec, tokens, logits, logits.softmax(-1), expert_GSK, weight_GSK, no_loss)


@contextmanager
def registered_router() -> Iterator[None]:
    """Register the router for a while, so that other tests have the product's routers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(routers.ROUTERS, "round_robin", RoundRobinSpec)
        patch.setitem(routing.ROUTERS, RoundRobinSpec, RoundRobin)
        yield


def train(degrees: Degrees, fields: dict[str, object]) -> list[dict]:
    """Train in any process; ranks of a pool register the router here."""
    with registered_router():
        model = model_of(router="round_robin", stride=3, **fields)
        return run(model, train_of(), degrees, Shape(), 4)


LIMITS: tuple[dict[str, object], ...] = ({"capacity_factor": 0.5, "z_coefficient": 0.01, "input_jitter": 0.1}, {})


@pytest.mark.sample(1)
@pytest.mark.parametrize("fields", LIMITS, ids=["with capacity", "dropless"])
def test_two_ranks_train_it_as_one_does(ranks: Pools, fields: dict[str, object]) -> None:
    reference = train(Degrees(), fields)
    assert reference[-1]["loss"] < reference[0]["loss"]
    assert any(layer["dropped"] > 0 for layer in reference[0]["layers"]) == bool(fields)
    assert_ranks_same(ranks[2].run(train, Degrees(expert=2), fields), reference, 1e-10)


def test_its_fields_are_read_and_refused_as_any_routers() -> None:
    raw_job = job(model={"moe": {"router": "round_robin", "stride": 3}})
    with registered_router():
        spec = JobSpec.parse(raw_job)
        assert JobSpec.parse(spec.model_dump(mode="json")) == spec
        assert spec.model.moe.experts_per_token == 2
        assert "stride" in json_schema()["$defs"]["MoESpec"]["properties"]
        with expect_problem("unknown_key", "stride", 3):
            MoESpec(router="switch_top1", stride=3, num_experts=4, model_dim=2, hidden_dim=2)
    with expect_problems([("not_a_choice", "model.moe.router", "round_robin"), ("unknown_key", "model.moe.stride", 3)]):
        JobSpec.parse(raw_job)
