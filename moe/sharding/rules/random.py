"""Operators that draw random numbers. Numbers have the key (seed, step, number of the operator in the graph, position
of the element in the whole tensor), so that all layouts draw the same. They differ from those of torch's generator."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from moe import random
from moe.sharding.exchange.mesh import Mesh
from moe.sharding.operands import RECOMPUTED, operands, results, shape_of
from moe.sharding.rules.dims import factor_dims, sizes_of, unsplit
from moe.sharding.rules.distributions import QUANTILES, parameters, values
from moe.sharding.rules.local import LocalCall
from moe.sharding.rules.rule import Rule
from moe.spec import spec_error

aten = torch.ops.aten

Elements = tuple[int, Sequence[int], Sequence[int], Sequence[Any]]
"""Elements that a rank draws: (number of the operator, shape of the whole tensor, shape of the part, first position of
the part)."""


def _draw_rule(lower: Callable[[LocalCall, Elements], Any]) -> Callable[[fx.Node], Rule]:
    """Rule of an operator that draws one number for each element of its result."""

    def rule(node: fx.Node) -> Rule:
        if results(node)[0].dtype.is_complex:
            return refuse(node)
        shape = tuple(results(node)[0].shape)
        dims = factor_dims(shape)
        number = _number(node)

        def draw_part(local: LocalCall) -> Any:
            first = [local.first(factors[0]) if factors else 0 for factors in dims]
            return lower(local, (number, list(shape), list(local.part_shape()), first))

        return Rule(
            operands=tuple(dims if shape_of(operand) == shape else unsplit(shape_of(operand))
                           for operand in operands(node)),
            results=(dims,) * len(results(node)),
            sizes=sizes_of((dims, shape)),
            lower=draw_part,
        )  # fmt: skip

    return rule


def _number(node: fx.Node) -> int:
    """Number of an operator among the drawing operators of the graph. A recomputed one has the number of the
    original."""
    name = node.meta[RECOMPUTED][1] if RECOMPUTED in node.meta else node.name
    drawing_operators = (
        operator for operator in node.graph.nodes if operator.target in RULES and RECOMPUTED not in operator.meta
    )
    return next(number for number, operator in enumerate(drawing_operators) if operator.name == name)


def _dropout(local: LocalCall, elements: Elements) -> Any:
    _, probability, training = local.node.args
    if training is False or probability == 0:
        return local.default()
    return local.runtime(dropout, elements, local.parts[0], probability)


def _bernoulli(local: LocalCall, elements: Elements) -> Any:
    """`bernoulli.p` of a tensor whose values do not matter, or a probability for each element."""
    args = local.arguments()[0]
    return local.runtime(bernoulli, elements, local.parts[0], args[1] if len(args) > 1 else args[0])


def _uniform(local: LocalCall, elements: Elements) -> Any:
    """`rand`, `rand_like`, or `uniform` between two bounds."""
    bounds = (0.0, 1.0)
    if local.node.target is aten.uniform.default:
        bounds = (*local.node.args[1:], *bounds[len(local.node.args) - 1 :])  # type: ignore[assignment]
    value = results(local.node)[0]
    return local.runtime(uniform, elements, *bounds, value.dtype, value.device)


def _lower_distribution(local: LocalCall, elements: Elements) -> Any:
    """One of the distributions of `QUANTILES`."""
    value = results(local.node)[0]
    arguments = list(local.arguments()[0])
    return local.runtime(
        draw_distribution,
        elements,
        QUANTILES[local.node.target].__name__,
        parameters(local.node, arguments),
        value.dtype,
        value.device,
    )


def dropout(mesh: Mesh, elements: Elements, part: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    """(part with elements zeroed with this probability and the others scaled up, mask of the kept elements)."""
    if probability == 1:
        return torch.zeros_like(part), torch.zeros_like(part, dtype=torch.bool)
    mask = _keep(mesh, elements, 1 - probability, part.device)
    return part * mask.to(part.dtype).mul_(1 / (1 - probability)), mask


def bernoulli(mesh: Mesh, elements: Elements, template: Tensor, probability: float | Tensor) -> Tensor:
    """1 with this probability, otherwise 0."""
    return (_draws(mesh, elements, template.device) < probability).to(template.dtype)


def uniform(
    mesh: Mesh, elements: Elements, low: float, high: float, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Uniform in [low, high)."""
    # as many bits as the dtype has: with more, the largest numbers would be rounded to the upper bound
    bits = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[dtype]
    numbers = torch.floor(_draws(mesh, elements, device) * 2.0**bits) * 2.0**-bits
    return (low + (high - low) * numbers).to(dtype)


def draw_distribution(
    mesh: Mesh, elements: Elements, distribution: str, parameters: list[Any], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Numbers of a distribution of `DISTRIBUTIONS`."""
    return values(distribution, _draws(mesh, elements, device), parameters, dtype)


def _key(mesh: Mesh, elements: Elements) -> int:
    return random.fold(mesh.draws.seed, mesh.draws.step, elements[0])


def _rows(elements: Elements, device: torch.device) -> Tensor:
    """Numbers of the part's rows among the rows of the whole tensor. Rows are along the last dimension."""
    _, full_shape, part_shape, offsets = elements
    rows = torch.zeros((), dtype=torch.int64, device=device)
    for size, length, begin in zip(full_shape[:-1], part_shape[:-1], offsets[:-1], strict=True):
        rows = rows[..., None] * size + torch.arange(begin, begin + length, device=device)
    return rows


def _keep(mesh: Mesh, elements: Elements, keep: float, device: torch.device) -> Tensor:
    _, full_shape, part_shape, offsets = elements
    if not full_shape:
        return _draws(mesh, elements, device) < keep
    return random.keep_mask(
        _key(mesh, elements), _rows(elements, device), full_shape[-1], keep, offsets[-1], part_shape[-1]
    )


def _draws(mesh: Mesh, elements: Elements, device: torch.device) -> Tensor:
    """float64 in [0, 1)."""
    _, full_shape, part_shape, offsets = elements
    counters = _rows(elements, device)
    if full_shape:
        counters = counters[..., None] * full_shape[-1] + torch.arange(
            offsets[-1], offsets[-1] + part_shape[-1], device=device
        )
    return random.uniform(_key(mesh, elements), counters)


def refuse(node: fx.Node) -> Rule:
    """Raises SpecError for an operator whose numbers would depend on the layout."""
    rule = "draws random numbers that would depend on the layout"
    remedy = "use torch.rand or torch.randn, which are keyed by position, or pass them to the module"
    raise spec_error("unsupported", node.meta.get("line") or node.name, str(node.target), rule, remedy)


RULES: dict[Any, Callable[[fx.Node], Rule]] = {
    aten.native_dropout.default: _draw_rule(_dropout),
    aten.bernoulli.p: _draw_rule(_bernoulli),
    aten.bernoulli.default: _draw_rule(_bernoulli),
    aten.bernoulli.Tensor: _draw_rule(_bernoulli),
    aten.rand.default: _draw_rule(_uniform),
    aten.rand_like.default: _draw_rule(_uniform),
    aten.uniform.default: _draw_rule(_uniform),
    **dict.fromkeys(QUANTILES, _draw_rule(_lower_distribution)),
    **dict.fromkeys(
        (
            aten.randperm.default, aten.multinomial.default, aten.poisson.default, aten.binomial.default,
            aten._standard_gamma.default, aten._sample_dirichlet.default,
        ),
        refuse,
    ),
}  # fmt: skip
