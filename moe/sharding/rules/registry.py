"""The rule of a captured node: the one place that knows which operators have one."""

from collections.abc import Callable
from typing import Any

from torch import fx

from moe.sharding.rules import pointwise, products, reductions, views
from moe.sharding.rules.rule import Rule
from moe.spec import Problem, SpecError

RuleMaker = Callable[[fx.Node], Rule]

RULES: dict[Any, RuleMaker] = {**products.RULES, **reductions.RULES, **views.RULES}


def rule_of(node: fx.Node) -> Rule:
    """Raises SpecError where an operator has none."""
    if node.target in RULES:
        return RULES[node.target](node)
    if pointwise.is_pointwise(node):
        return pointwise.pointwise(node)
    raise SpecError(Problem("model", node.meta.get("where") or node.name,
                            f"uses {node.target}, which has no rule that says how its dimensions may be split",
                            "register a rule (moe.sharding.register), put it in a sharding.manual part, or have it run "
                            "on whole tensors: plan(..., replicate=[operator])"))  # fmt: skip
