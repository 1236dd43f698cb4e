"""Costs of operators' options and of changes of placement, from the planner's model of the cluster."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from moe.plan.cluster.cluster import Cluster
from moe.plan.cluster.kernels import USUAL_WIDTHS
from moe.plan.cost.collectives import Network, Ranks
from moe.plan.software import find_software
from moe.sharding.exchange.moves import Moves
from moe.sharding.operands import operands, results
from moe.sharding.placement import WHOLE, Placements, part_bytes
from moe.sharding.rules.rule import AxisOption, Options, Rule, operand_placements, result_placements


@dataclass(frozen=True)
class Choice:
    """Options of an operator along all axes of a mesh, with their costs on one rank."""

    options: Options
    seconds: float
    """Seconds of arithmetic, memory access and the operator's own exchanges."""
    exchange_s: float
    """The part of `seconds` that is exchanges."""
    num_bytes: float
    """Bytes of operands and results."""
    kept_bytes: float
    """Further bytes that it saves if its gradient is computed."""


class Costs:
    """Costs on a mesh of a cluster. With `loop`, axis 0 is the loop over micro-batches, along which operators have the
    loop's options."""

    def __init__(
        self, cluster: Cluster, degrees: Sequence[int], loop: Mapping[fx.Node, AxisOption] | None = None
    ) -> None:
        self.cluster, self.degrees, self.loop = cluster, tuple(degrees), loop
        self.moves = Moves(cluster, degrees, loop is not None)
        self._traits, self._network = cluster.calibrated_device, Network(cluster)
        self._ranks = [Ranks(degree, math.prod(self.degrees[axis + 1 :])) for axis, degree in enumerate(degrees)]
        self._software = find_software(None, "ours", self._traits.layer_s)
        self.overlap = self._software.overlap
        """Share of early exchanges that arithmetic can hide, if there is enough of it."""
        self._choices: dict[fx.Node, list[Choice]] = {}

    def move_s(
        self, shape: tuple[int, ...], itemsize: int, before: Placements, after: Placements, is_bucketed: bool = False
    ) -> float:
        return self.moves.cheapest(shape, itemsize, before, after, is_bucketed=is_bucketed)[0]

    def update_s(self, part_bytes: float, optimizer_slots: float) -> float:
        """Seconds of the optimizer's update of a part: it reads weight, gradient and optimizer state, and writes weight
        and optimizer state."""
        return part_bytes * (3 + 2 * optimizer_slots) / self._traits.memory_bytes_per_s

    def is_hoisted(self, placements: Placements) -> bool:
        """Whether a tensor is the same for all micro-batches of a loop: it is computed before the loop, and held until
        its end."""
        return self.loop is not None and placements[0] == WHOLE

    def part_bytes(self, shape: Sequence[int], itemsize: int, placements: Placements) -> int:
        return part_bytes(shape, itemsize, placements, self.degrees)

    def choices(self, node: fx.Node, rule: Rule) -> list[Choice]:
        """All possible choices, those with the fewest splits first; of choices with the same placements, the cheapest
        one."""
        if node not in self._choices:
            self._choices[node] = self._possible(node, rule)
        return self._choices[node]

    def _possible(self, node: fx.Node, rule: Rule) -> list[Choice]:
        choices: dict[tuple[Placements, ...], Choice] = {}
        options_by_axis = [rule.axis_options()] * len(self.degrees)
        if self.loop is not None:
            options_by_axis[0] = (self.loop[node],)
        for options in itertools.product(*options_by_axis):
            if any(
                degree == 1 and option.name != "whole" for option, degree in zip(options, self.degrees, strict=True)
            ) or not rule.is_possible(options, self.degrees):
                continue
            choice = self._choice(node, rule, options)
            key = (
                *(operand_placements(options, number) for number in range(len(rule.operands))),
                *(result_placements(options, number) for number in range(len(rule.results))),
            )
            if key not in choices or choice.seconds < choices[key].seconds:
                choices[key] = choice
        return list(choices.values())

    def _choice(self, node: fx.Node, rule: Rule, options: Options) -> Choice:
        num_bytes = 0
        for number, operand in enumerate(operands(node)):
            value = operand.meta["val"]
            num_bytes += self.part_bytes(value.shape, value.dtype.itemsize, operand_placements(options, number))
        result_bytes = 0
        for number, value in enumerate(results(node)):
            if value is not None:
                result_bytes += self.part_bytes(value.shape, value.dtype.itemsize, result_placements(options, number))
        seconds = 0.0
        if rule.work != "none":
            seconds = (num_bytes + result_bytes) / self._traits.memory_bytes_per_s
        if rule.is_product:
            seconds = max(seconds, self._product_s(node, rule, options))
        arithmetic_s = seconds
        for axis, option in enumerate(options):
            if option.exchange is not None:
                moved_bytes = option.exchange.moved_bytes(self.degrees[axis]) / self._parts_along_other_axes(
                    options, axis
                )
                ranks = self._ranks[axis]
                times = option.exchange.times
                if option.exchange.kind == "halo":
                    seconds += times * self._network.send(moved_bytes / times, ranks.stride)
                elif option.exchange.kind == "all_to_all":
                    seconds += times * self._network.all_to_all(moved_bytes / times, ranks)
                else:
                    seconds += times * self._network.gather(moved_bytes / times, ranks)
        runs = self.degrees[0] if self.loop is not None and options[0].name != "whole" else 1
        # a view shares its operand's memory
        total_bytes = num_bytes if rule.work == "none" else num_bytes + result_bytes
        kept_bytes = 0.0
        if rule.saved_elements is not None:
            kept_bytes = rule.saved_elements(self._sizes(rule, options)) * operands(node)[0].meta["val"].dtype.itemsize
        return Choice(options, runs * seconds, runs * (seconds - arithmetic_s), total_bytes, kept_bytes)

    def _parts_along_other_axes(self, options: Options, axis: int) -> int:
        """Number of parts into which the other axes split the exchanged tensors."""
        return math.prod(
            degree
            for other_axis, (option, degree) in enumerate(zip(options, self.degrees, strict=True))
            if other_axis != axis and option.factor is not None
        )

    def _sizes(self, rule: Rule, options: Options, *, all_dims: bool = False) -> dict[str, int]:
        """Sizes of factors on a rank. An exchange divides the work once; with `all_dims`, it divides all dimensions
        that it splits."""
        sizes = dict(rule.sizes)
        for option, degree in zip(options, self.degrees, strict=True):
            factors = set() if option.factor is None else {option.factor}
            if option.exchange is not None:
                tensors = zip(rule.results, option.exchange.results, strict=True)
                if all_dims:
                    tensors = zip(
                        (*rule.operands, *rule.results),
                        (*option.exchange.operands, *option.exchange.results),
                        strict=True,
                    )
                split_factors = [dims[dim][0] for dims, dim in tensors if dim is not None and dims[dim]]
                factors = set(split_factors if all_dims else split_factors[:1])
            for factor in factors:
                sizes[factor] = -(-sizes[factor] // degree)
        return sizes

    def _product_s(self, node: fx.Node, rule: Rule, options: Options) -> float:
        sizes, windows = self._sizes(rule, options), 1
        for option, degree in zip(options, self.degrees, strict=True):
            # `rule.flops` counts the windows of a dimension that has no factor
            if (
                option.exchange is not None
                and option.exchange.kind == "halo"
                and not any(
                    dims[dim]
                    for dims, dim in zip(rule.results, option.exchange.results, strict=True)
                    if dim is not None
                )
            ):
                windows *= degree
        kernels, dtype = self._traits.kernels, _name(operands(node)[0].meta["val"].dtype)
        dtype = dtype if dtype in kernels.products else "float32"
        flops = rule.flops * math.prod(sizes.values()) / windows
        if rule.work == "attention":
            return flops / kernels.attention_of(USUAL_WIDTHS).flops_per_s
        if (grouping := rule.grouped) is not None:
            share = sizes[grouping.groups] / rule.sizes[grouping.groups]
            num_groups = self._sizes(rule, options, all_dims=True)[grouping.groups]
            rows = max(1.0, sizes[grouping.rows] * grouping.per_row * share / num_groups)
            launches = self._software.host.expert_s / 3 * num_groups * grouping.passes
            experts = kernels.experts[dtype]
            return launches + flops / experts.flops_per_s * (rows + experts.knee_rows) / rows
        tensors = [{factor for dim in dims for factor in dim} for dims in (*rule.operands, *rule.results)]
        rows = min(
            (size for factor, size in sizes.items() if not all(factor in factors for factors in tensors)), default=1
        )
        products = kernels.products[dtype]
        return flops / products.flops_per_s * (rows + products.knee_rows) / rows


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
