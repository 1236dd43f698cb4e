"""Rules that a user registers, and operators that run on whole tensors: checked against the captured graph."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from moe import sharding
from moe.sharding.rules.registry import RULES
from moe.sharding.rules.rule import Rule
from tests import refusals
from tests.sharding.on_ranks import cores
from tests.sharding.refused import BATCH, ONE_AXIS, Plain, lines_of, planning_problems

line_of = lines_of(__file__)


@pytest.mark.slow
def test_replicate_takes_short_and_full_names() -> None:
    module = Plain(lambda module, h: h + torch.view_as_real(torch.polar(h.abs(), h)).sum(-1))  # polar
    refusals.check(planning_problems(module), [("no_sharding_rule", line_of("polar"), "aten.polar.default")])
    plan = sharding.plan(module, BATCH, cores(1), replicate=["polar"])
    for name in ("aten.polar", "aten.polar.default"):
        assert torch.allclose(sharding.apply(module, plan, replicate=[name])(*BATCH), module(*BATCH))


@pytest.mark.parametrize("name", ["aten.linaer.default", "aten.men.default"])
def test_unknown_operators_are_refused_with_the_nearest_name(name: str) -> None:
    refusals.check(planning_problems(Plain(), replicate=[name]), [("not_found", "replicate", name)])


@torch.library.custom_op("tests::doubled", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


@double.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


DOUBLED = torch.ops.tests.doubled.default
BOTH = ((("rows",), ("columns",)),)
SIZES = {"rows": 8, "columns": 8}
MODULE = Plain(lambda module, h: h + double(h.detach()))  # doubled
INVALID: dict[str, Callable[[fx.Node], Any]] = {
    "None": lambda node: None,
    "no operand": lambda node: Rule((), BOTH, SIZES),
    "two results": lambda node: Rule(BOTH, BOTH * 2, SIZES),
    "one dimension": lambda node: Rule(((("rows",),),), BOTH, SIZES),
    "another size": lambda node: Rule(BOTH, BOTH, SIZES | {"rows": 64}),
    "a factor without a size": lambda node: Rule(BOTH, BOTH, {"rows": 8}),
    "a string of factors": lambda node: Rule((("rows", "columns"),), BOTH, SIZES),
}


@pytest.fixture
def remove_registered_rule() -> Iterator[None]:
    yield
    RULES.pop(DOUBLED, None)


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", INVALID)
@pytest.mark.usefixtures("remove_registered_rule")
def test_a_rule_that_does_not_match_its_tensors_is_refused_with_the_users_line(case: str) -> None:
    sharding.register(DOUBLED, INVALID[case])
    refusals.check(planning_problems(MODULE), [("invalid_value", line_of("doubled"), "tests.doubled.default")])


@pytest.mark.usefixtures("remove_registered_rule")
def test_a_matching_rule_is_used() -> None:
    sharding.register(DOUBLED, lambda node: Rule(BOTH, BOTH, SIZES))
    sharding.plan(MODULE, BATCH, cores(2), mesh=ONE_AXIS)


@pytest.mark.parametrize("target", [double, torch.ops.tests.doubled, "tests.doubled"], ids=["op", "packet", "name"])
def test_rules_are_registered_for_overloads_only(target: Any) -> None:
    with refusals.expect_problem("wrong_type", "sharding.register", str(target)):
        sharding.register(target, lambda node: Rule(BOTH, BOTH, SIZES))


def test_a_rule_instead_of_a_function_is_refused() -> None:
    with refusals.expect_problem("wrong_type", "sharding.register", "Rule"):
        sharding.register(DOUBLED, Rule(BOTH, BOTH, SIZES))  # type: ignore[arg-type]
