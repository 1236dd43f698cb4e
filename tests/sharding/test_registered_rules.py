"""Rules of one's own, and operators that run on whole tensors: held against what the graph has."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from moe import sharding
from moe.sharding.rules.registry import RULES
from moe.sharding.rules.rule import Rule
from moe.spec import SpecError
from tests.sharding.on_ranks import cores
from tests.sharding.refused import BATCH, ONE_AXIS, Plain, lines_of, refused

line_of = lines_of(__file__)


def turned(module: Plain, h: Tensor) -> Tensor:
    return h + torch.view_as_real(torch.polar(h.abs(), h)).sum(-1)


def test_an_operator_is_named_in_short_and_in_full() -> None:
    module = Plain(turned)
    assert "has no rule" in refused(module)
    plan = sharding.plan(module, BATCH, cores(1), replicate=["polar"])
    for name in ("aten.polar", "aten.polar.default"):
        assert torch.allclose(sharding.apply(module, plan, replicate=[name])(*BATCH), module(*BATCH))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("aten.linaer.default", "replicate (='aten.linaer.default') names no operator that the module becomes"),
        ("aten.men.default", "did you mean aten.mean.default"),
    ],
)
def test_a_name_of_no_operator_is_told_with_the_nearest(name: str, told: str) -> None:
    assert told in refused(Plain(), replicate=[name])


@torch.library.custom_op("tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


DOUBLED = torch.ops.tests.doubled.default
BOTH = ((("rows",), ("columns",)),)
SIZES = {"rows": 8, "columns": 8}

MADE: dict[str, tuple[Callable[[fx.Node], Any], str]] = {
    "nothing": (lambda node: None, "is no Rule (=NoneType); return one"),
    "no operand": (lambda node: Rule((), BOTH, SIZES), "has 0 operands, of 1"),
    "two results": (lambda node: Rule(BOTH, BOTH * 2, SIZES), "has 2 results, of 1"),
    "one dimension": (lambda node: Rule(((("rows",),),), BOTH, SIZES), "gives operands[0] 1 dimensions, of [8, 8]"),
    "another size": (lambda node: Rule(BOTH, BOTH, SIZES | {"rows": 64}),
                     "has sizes {'rows': 64} for dimension 0 of operands[0], which is 8 long; take it from the node"),
    "a factor without a size": (lambda node: Rule(BOTH, BOTH, {"rows": 8}), "has sizes {'columns': None}"),
    "text for factors": (lambda node: Rule((("rows", "columns"),), BOTH, SIZES), "give a tuple of factors: ('rows',)"),
}  # fmt: skip


@pytest.fixture
def registered() -> Iterator[None]:
    yield
    RULES.pop(DOUBLED, None)


@pytest.mark.parametrize("which", MADE)
@pytest.mark.usefixtures("registered")
def test_a_rule_that_is_not_of_its_tensors_is_told_with_the_users_line(which: str) -> None:
    maker, told = MADE[which]
    sharding.register(DOUBLED, maker)
    message = refused(Plain(lambda module, h: h + doubled(h.detach())))  # doubled
    assert message.startswith(f"{line_of('doubled')} (='tests.doubled.default') has a rule that ")
    assert told in message


@pytest.mark.usefixtures("registered")
def test_a_rule_of_its_tensors_is_used() -> None:
    sharding.register(DOUBLED, lambda node: Rule(BOTH, BOTH, SIZES))
    sharding.plan(Plain(lambda module, h: h + doubled(h.detach())), BATCH, cores(2), mesh=ONE_AXIS)


@pytest.mark.parametrize("target", [doubled, torch.ops.tests.doubled, "tests.doubled"], ids=str)
def test_a_rule_of_what_is_no_operator_is_told(target: Any) -> None:
    with pytest.raises(SpecError, match=r"must be given an operator; give it with its overload, as torch\.ops"):
        sharding.register(target, lambda node: Rule(BOTH, BOTH, SIZES))


def test_a_rule_that_is_no_function_is_told() -> None:
    with pytest.raises(SpecError, match=r"sharding\.register \(='Rule'\) must be given a function that makes a Rule"):
        sharding.register(DOUBLED, Rule(BOTH, BOTH, SIZES))  # type: ignore[arg-type]
