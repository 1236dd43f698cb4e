"""The rule of a captured node: the one place that knows which operators have one."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from moe.sharding import torch_private
from moe.sharding.hints.manual import ManualPart
from moe.sharding.operands import is_operator, operands, results, shape_of
from moe.sharding.rules import (
    annotations,
    attention,
    boundaries,
    convolutions,
    creation,
    dtensor,
    gathers,
    grouped_products,
    manual,
    norms,
    pointwise,
    pooling,
    products,
    random,
    reductions,
    rowwise,
    scatters,
    views,
)
from moe.sharding.rules.dims import unsplit
from moe.sharding.rules.rule import Rule
from moe.sharding.rules.user_rules import RuleMaker, with_checks
from moe.spec import Problem, SpecError, spec_error

FAMILIES = (
    annotations, attention, boundaries, convolutions, creation, gathers, grouped_products, norms, pooling, products,
    random, reductions, rowwise, scatters, views,
)  # fmt: skip
RULES: dict[Any, RuleMaker] = {target: maker for family in FAMILIES for target, maker in family.RULES.items()}


def register(target: Any, maker: RuleMaker) -> None:
    """Register a rule for an operator; it is checked against the tensors of each node. Raises SpecError if `target` is
    no operator or `maker` is not callable."""
    if not isinstance(target, torch_private.OpOverload):
        raise spec_error("wrong_type", "sharding.register", str(target), "must get an operator",
                         "pass it with its overload, as torch.ops.mylib.myop.default")  # fmt: skip
    if not callable(maker):
        rule, remedy = "must get a function from a graph node to a Rule", "pass lambda node: Rule(...)"
        raise spec_error("wrong_type", "sharding.register", type(maker).__name__, rule, remedy)
    RULES[target] = with_checks(maker)


def rule_of(node: fx.Node) -> Rule:
    """The rule of a node. Raises SpecError if its operator has none."""
    if node.target in RULES:
        rule = RULES[node.target](node)
    elif (maker := grouped_products.BY_NAME.get(str(node.target))) is not None:
        rule = maker(node)
    elif pointwise.is_pointwise(node):
        rule = pointwise.pointwise(node)
    elif torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        rule = random.refuse(node)
    elif (dtensor_rule := dtensor.rule(node)) is not None:
        rule = dtensor_rule
    else:
        raise SpecError(_without_rule(node))
    if any(result is not None and result.is_complex() for result in results(node)):  # complex numbers have no maximum
        rule = replace(rule, passes=rule.passes & {"sum"})
    return rule


def _without_rule(node: fx.Node) -> Problem:
    if any(result is not None and result.layout is not torch.strided for result in results(node)):
        rule = "returns a sparse tensor, which cannot be sharded"
        remedy = "use dense tensors, such as sparse=False for an embedding"
        return Problem("unsupported", node.meta.get("line") or node.name, str(node.target), rule, remedy)
    rule = "has no sharding rule"
    remedy = (
        "add one with sharding.register, use sharding.manual, or run it on whole tensors: plan(..., "
        f"replicate=[{str(node.target)!r}])"
    )
    return Problem("no_sharding_rule", node.meta.get("line") or node.name, str(node.target), rule, remedy)


def names_of(target: Any) -> set[str]:
    """Names by which a user may call an operator: `aten.polar.default`, `aten.polar`, `polar`."""
    full = str(target)
    short = full.rpartition(".")[0]
    return {full, short, short.partition(".")[2]} - {""}


class Rules:
    """The rules of one graph's nodes on one mesh, each made once. Operators named in `replicate` run on whole tensors
    where they have none."""

    def __init__(
        self,
        replicate: Iterable[str] = (),
        parts: Mapping[str, ManualPart] | None = None,
        mesh: Mapping[str, int] | None = None,
    ) -> None:
        self._replicate = tuple(replicate)
        self._parts, self._mesh = parts or {}, mesh or {}
        self._cache: dict[fx.Node, Rule] = {}

    def __call__(self, node: fx.Node) -> Rule:
        if node not in self._cache:
            self._cache[node] = self._make(node)
        return self._cache[node]

    def _make(self, node: fx.Node) -> Rule:
        if node.target in manual.TARGETS:
            return manual.manual(node, self._parts, self._mesh)
        try:
            return rule_of(node)
        except SpecError:
            if not names_of(node.target) & set(self._replicate):
                raise
            return Rule(
                tuple(unsplit(shape_of(operand)) for operand in operands(node)),
                tuple(() if result is None else unsplit(result.shape) for result in results(node)),
                {},
            )

    def check(self, graph: fx.Graph) -> None:
        """Raise SpecError for all operators without a rule, and for names in `replicate` that no operator of the graph
        has."""
        problems: dict[Any, Problem] = dict(self._unknown(graph))
        for node in graph.nodes:
            if not is_operator(node) or node.target in (*problems, *manual.TARGETS):
                continue
            try:
                self(node)
            except SpecError as error:
                problems[node.target] = error.problems[0]
        if problems:
            raise SpecError(problems.values())

    def _unknown(self, graph: fx.Graph) -> Iterator[tuple[str, Problem]]:
        """Names in `replicate` that no operator of a graph has, each with its problem."""
        operator_names = [names_of(node.target) for node in graph.nodes if is_operator(node)]
        known_names = set[str]().union(*operator_names)
        for name in self._replicate:
            if name not in known_names:
                similar_names = difflib.get_close_matches(
                    name, sorted(max(names, key=len) for names in operator_names), 3
                )
                remedy = f"did you mean {' or '.join(dict.fromkeys(similar_names))}?" if similar_names else "omit it"
                yield (name, Problem("not_found", "replicate", name, "names no operator of the captured graph", remedy))
