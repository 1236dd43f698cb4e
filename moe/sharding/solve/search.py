"""Search for an assignment on one mesh. With one axis, or if the program is small, one integer program is solved;
otherwise coordinate descent over the axes.

Coordinate descent solves one axis while the others are fixed, until nothing changes. It starts from several
assignments: each axis solved alone, and one axis over all ranks. At the end all axes are solved together, restricted to
the options chosen on the way. A block takes tenths of a second for one axis, and minutes for two axes without that
restriction.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from moe.sharding.capture.capture import CapturedGraph
from moe.sharding.hints.hints import Pin
from moe.sharding.operands import is_operator
from moe.sharding.propagation.assignment import Assignment
from moe.sharding.rules.rule import Rule
from moe.sharding.solve.bound import ANY, Bound
from moe.sharding.solve.costs import Costs
from moe.sharding.solve.integer_program import INFINITY
from moe.sharding.solve.placements import AllowedOptions, PlacementProgram
from moe.sharding.solve.solution import MemoryLimits, ShardingSolution

SMALL = 40_000
"""Number of flows up to which all axes are solved together at once."""

_TURNS = 3
"""Maximum number of turns of each axis."""
_LEAST_GAIN = 1e-3
"""Minimum gain of a turn, as a share of the step, that counts as progress."""
_HOPELESS = 2.0
"""A turn is given up if its relaxation alone costs this many times the best assignment found so far."""


@dataclass(frozen=True, eq=False)
class PlacementSearch:
    """Search for the best assignment of one captured graph on one mesh."""

    capture: CapturedGraph
    costs: Costs
    rule_of: Callable[[fx.Node], Rule]
    limits: MemoryLimits
    pins: Mapping[str, Pin]
    classes: Mapping[fx.Node, fx.Node] | None = None
    bound: Bound = field(default_factory=dict)
    """Requirements on operators that follow from hints: work that hints split stays split."""
    _solutions: dict[tuple[int, tuple[str, ...]], ShardingSolution | None] = field(default_factory=dict)
    """Solutions of single axes, by the axis and the options of the other axes."""

    def best(self, begin: Sequence[Assignment] = (), *, first: bool = False) -> ShardingSolution | None:
        """The cheapest assignment that fits in memory, or with `first` the first one found; None if none fits.
        Coordinate descent also starts from the assignments in `begin`."""
        axes = [axis for axis, degree in enumerate(self.costs.degrees) if degree > 1 and not self._is_loop(axis)]
        if len(axes) < 2 or self._num_flows() <= SMALL:
            return self._solve({}, 1, quick=first)
        assignments: list[Assignment] = []
        best_s = INFINITY
        for assignment, order in self._beginnings(begin, axes):
            best_s = self._take_turns(assignment, order, assignments, best_s)
            if first and best_s < INFINITY:
                break
        joint_solution = None if first and best_s < INFINITY else self._solve(self._allowed_options(assignments), 1)
        return joint_solution or min(
            filter(None, self._solutions.values()), key=lambda solution: solution.seconds, default=None
        )

    def _beginnings(self, begin: Sequence[Assignment], axes: list[int]) -> Iterator[tuple[Assignment, list[int]]]:
        """(assignment to start from, order in which axes take turns)."""
        yield from ((assignment, axes) for assignment in begin)
        for order in (axes[index:] + axes[:index] for index in range(len(axes))):
            # while only one axis splits anything, memory is that of as many ranks
            num_ranks = math.prod(self.costs.degrees[axis] for axis in order[1:])
            solution = self._solve(self._with_other_whole(order[0]), num_ranks, quick=True)
            if solution is not None:
                yield solution.assignment, order
        if (alike := self._all_alike()) is not None:
            yield alike, axes

    def price(self, assignment: Assignment) -> ShardingSolution | None:
        """Solution for a given assignment, in which only the options of views, and the tensors saved for the backward
        pass, are chosen; None if it does not fit in memory."""
        return self._solve(self._but_views(assignment), 1)

    def _but_views(self, assignment: Assignment) -> AllowedOptions:
        """The options of an assignment, and any option for views."""
        return {
            node: tuple({name} for name in self._option_names(node, assignment))
            for node in self._nodes()
            if not is_operator(node) or self.rule_of(node).work != "none"
        }

    def _solve(
        self, choices: AllowedOptions, memory_factor: float, max_s: float = INFINITY, *, quick: bool = False
    ) -> ShardingSolution | None:
        limits = replace(self.limits, memory_bytes=self.limits.memory_bytes * memory_factor)
        return PlacementProgram(
            self.capture, self.costs, self.rule_of, limits, self.pins, self.classes, choices, self.bound
        ).solve(max_s, quick=quick)

    def _num_flows(self) -> int:
        """Rough number of flows of the whole program: pairs of placements of each operand."""
        operators = filter(is_operator, self._nodes())
        return sum(len(self.costs.choices(node, self.rule_of(node))) ** 2 // 2 for node in operators)

    def _take_turns(self, begin: Assignment, order: list[int], assignments: list[Assignment], best_s: float) -> float:
        """Coordinate descent from one assignment; the first axis of `order` is solved last. Adds each assignment on the
        way to `assignments`. Returns the smallest cost so far in seconds, which was `best_s` before."""
        assignments.append(begin)
        current, best, num_failures = begin, INFINITY, 0
        for turn in range(_TURNS * len(order)):
            axis = order[(turn + 1) % len(order)]
            solution = self._solve_axis(axis, current, _HOPELESS * best_s)
            if solution is None or solution.seconds >= best * (1 - _LEAST_GAIN):
                num_failures += 1
                if num_failures == len(order) - 1:
                    break
                continue
            current, best, num_failures = solution.assignment, solution.seconds, 0
            assignments.append(current)
        return min(best_s, best)

    def _solve_axis(self, free: int, assignment: Assignment, max_s: float) -> ShardingSolution | None:
        """The best solution of one axis with the others fixed; None if it costs more than `max_s` seconds."""
        names_by_node = (self._option_names(node, assignment) for node in self._nodes())
        key = (free, tuple(name for names in names_by_node for axis, name in enumerate(names) if axis != free))
        if key not in self._solutions:
            self._solutions[key] = self._solve(self._with_others_fixed(free, assignment), 1, max_s, quick=True)
        return self._solutions[key]

    def _all_alike(self) -> Assignment | None:
        """The best assignment of a mesh of one axis over all ranks, used along every axis as far as sizes allow."""
        costs, degrees = self.costs, self.costs.degrees
        if costs.loop is not None:
            return None  # the other beginnings remain
        flat = Costs(costs.cluster, (math.prod(degrees),))
        if any(None not in pin and len(set(pin)) > 1 for pin in self.pins.values()):
            return None  # hints that differ by axis
        pins = {
            name: (next((placement for placement in pin if placement is not None), None),)
            for name, pin in self.pins.items()
        }
        solution = PlacementProgram(self.capture, flat, self.rule_of, self.limits, pins, self.classes).solve()
        if solution is None:
            return None
        options = {}
        for node in filter(is_operator, self._nodes()):
            (option,) = solution.assignment.options[node.name]
            rule = self.rule_of(node)
            whole_option = rule.axis_options()[0]
            candidates = (
                (whole_option,) * num_whole + (option,) * (len(degrees) - num_whole)
                for num_whole in range(len(degrees) + 1)
            )
            options[node.name] = next(candidate for candidate in candidates if rule.is_possible(candidate, degrees))
        leaves = {name: placements * len(degrees) for name, placements in solution.assignment.leaves.items()}
        return Assignment(degrees, leaves, options)

    def _is_loop(self, axis: int) -> bool:
        return axis == 0 and self.costs.loop is not None

    def _axes(self) -> range:
        return range(len(self.costs.degrees))

    def _with_other_whole(self, free: int) -> AllowedOptions:
        """Any option along one axis; along the others unsplit, except for what hints pin or bind."""
        choices = {}
        for node in self._nodes():
            names = self._names(node)
            choices[node] = tuple(
                names
                if axis == free or self._is_loop(axis) or self._is_pinned(node, axis) or self._is_bound(node, axis)
                else {"whole", "R"}
                for axis in self._axes()
            )
        return choices

    def _is_bound(self, node: fx.Node, axis: int) -> bool:
        return node in self.bound and self.bound[node][axis] != ANY

    def _is_pinned(self, node: fx.Node, axis: int) -> bool:
        return any(
            (pin := self.pins.get(tensor.name)) is not None and pin[axis] is not None for tensor in (node, *node.users)
        )

    def _with_others_fixed(self, free: int, assignment: Assignment) -> AllowedOptions:
        """Any option along one axis; along the others those of an assignment."""
        choices = {}
        for node in self._nodes():
            names = self._names(node)
            current = self._option_names(node, assignment)
            choices[node] = tuple(names if axis == free else {current[axis]} for axis in self._axes())
        return choices

    def _allowed_options(self, assignments: list[Assignment]) -> AllowedOptions:
        """The options that any of the assignments has, or unsplit."""
        choices: dict[fx.Node, tuple[set[str], ...]] = {}
        for node in self._nodes():
            whole_name = "whole" if is_operator(node) else "R"
            names_by_assignment = [self._option_names(node, assignment) for assignment in assignments]
            choices[node] = tuple(
                {whole_name, *(names[axis] for names in names_by_assignment)} for axis in self._axes()
            )
        return choices

    def _nodes(self) -> Iterator[fx.Node]:
        """Operators, parameters and buffers: one of each class, whose options the others share."""
        classes, leaves = self.classes or {}, self.capture.leaves
        for node in self.capture.graph.graph.nodes:
            is_placed = node in leaves and leaves[node].kind in ("parameter", "buffer")
            if (is_placed or is_operator(node)) and classes.get(node, node) is node:
                yield node

    def _option_names(self, node: fx.Node, assignment: Assignment) -> tuple[str, ...]:
        if is_operator(node):
            return tuple(option.name for option in assignment.options[node.name])
        return tuple(map(str, assignment.leaves[node.name]))

    def _names(self, node: fx.Node) -> set[str]:
        if is_operator(node):
            return {option.name for option in self.rule_of(node).axis_options()}
        return {"R", *(f"S({dim})" for dim in range(len(self.capture.leaves[node].shape)))}
