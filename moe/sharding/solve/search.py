"""Assignments for a mesh of one axis, by one integer program; of more axes, by one where it is small, and else by
turns.

By turns: one axis is solved while the others stay as they are, until nothing changes, from several beginnings: each
axis alone, and one axis over all ranks; then all at once, over all that was chosen on the way. One axis of a block
takes tenths of a second, two at once with nothing left out minutes.
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
"""Flows, above which axes are solved by turns."""

_TURNS = 3
"""Turns of each axis at most."""
_LEAST_GAIN = 1e-3
"""Share of a step by which a turn has to better it for another one."""
_HOPELESS = 2.0
"""Turns end where the relaxation alone takes so many times the seconds of the best that was found."""


@dataclass(frozen=True, eq=False)
class PlacementSearch:
    """The inner plan of one captured graph on one mesh."""

    capture: CapturedGraph
    costs: Costs
    rule_of: Callable[[fx.Node], Rule]
    limits: MemoryLimits
    pins: Mapping[str, Pin]
    classes: Mapping[fx.Node, fx.Node] | None = None
    bound: Bound = field(default_factory=dict)
    """Dimensions that hints split: no assignment replicates them."""
    _solutions: dict[tuple[int, tuple[str, ...]], ShardingSolution | None] = field(default_factory=dict)
    """Of one axis beside others, by what these have."""

    def best(self, begin: Sequence[Assignment] = (), *, first: bool = False) -> ShardingSolution | None:
        """The cheapest assignment that has room, or the first that is found; None where none is. Several axes are
        also searched from `begin`."""
        axes = [
            axis for axis, degree in enumerate(self.costs.degrees) if degree > 1 and not self._is_loop(axis)
        ]
        if len(axes) < 2 or self._num_flows() <= SMALL:
            return self._solve({}, 1, quick=first)
        assignments: list[Assignment] = []
        least = INFINITY
        for assignment, order in self._beginnings(begin, axes):
            least = self._take_turns(assignment, order, assignments, least)
            if first and least < INFINITY:
                break
        together = None if first and least < INFINITY else self._solve(self._among(assignments), 1)
        return together or min(
            filter(None, self._solutions.values()), key=lambda solution: solution.seconds, default=None
        )

    def _beginnings(
        self, begin: Sequence[Assignment], axes: list[int]
    ) -> Iterator[tuple[Assignment, list[int]]]:
        """Assignments from which axes take turns, and the order in which they do."""
        yield from ((assignment, axes) for assignment in begin)
        for order in (axes[at:] + axes[:at] for at in range(len(axes))):
            # while only one axis splits anything, memory is that of as many ranks
            num_ranks = math.prod(self.costs.degrees[axis] for axis in order[1:])
            solution = self._solve(self._with_other_whole(order[0]), num_ranks, quick=True)
            if solution is not None:
                yield solution.assignment, order
        if (alike := self._all_alike()) is not None:
            yield alike, axes

    def price(self, assignment: Assignment) -> ShardingSolution | None:
        """An assignment with its costs, with views where they save exchanges, and with what is best kept for the
        backward pass; None where it has no room."""
        return self._solve(self._but_views(assignment), 1)

    def _but_views(self, assignment: Assignment) -> AllowedOptions:
        """An assignment as it is, with any option for views."""
        return {
            node: tuple({name} for name in self._option_names(node, assignment))
            for node in self._nodes()
            if not is_operator(node) or self.rule_of(node).work != "none"
        }

    def _solve(
        self, choices: AllowedOptions, room: float, max_s: float = INFINITY, *, quick: bool = False
    ) -> ShardingSolution | None:
        limits = replace(self.limits, memory_bytes=self.limits.memory_bytes * room)
        return PlacementProgram(
            self.capture, self.costs, self.rule_of, limits, self.pins, self.classes, choices, self.bound
        ).solve(max_s, quick=quick)

    def _num_flows(self) -> int:
        """Of the whole program, roughly: pairs of placements of each operand."""
        operators = filter(is_operator, self._nodes())
        return sum(len(self.costs.choices(node, self.rule_of(node))) ** 2 // 2 for node in operators)

    def _take_turns(
        self, begin: Assignment, order: list[int], assignments: list[Assignment], least: float
    ) -> float:
        """Add what is found on the way: the first axis of `order` is solved last. Gives the fewest seconds so far,
        `least` before."""
        assignments.append(begin)
        current, best, in_vain = begin, INFINITY, 0
        for turn in range(_TURNS * len(order)):
            axis = order[(turn + 1) % len(order)]
            solution = self._beside(axis, current, _HOPELESS * least)
            if solution is None or solution.seconds >= best * (1 - _LEAST_GAIN):
                in_vain += 1
                if in_vain == len(order) - 1:
                    break
                continue
            current, best, in_vain = solution.assignment, solution.seconds, 0
            assignments.append(current)
        return min(least, best)

    def _beside(self, free: int, assignment: Assignment, max_s: float) -> ShardingSolution | None:
        """The best of one axis, the others as they are; None where it takes more than `most` seconds."""
        names_by_node = (self._option_names(node, assignment) for node in self._nodes())
        key = (free, tuple(name for names in names_by_node for at, name in enumerate(names) if at != free))
        if key not in self._solutions:
            self._solutions[key] = self._solve(
                self._with_others_fixed(free, assignment), 1, max_s, quick=True
            )
        return self._solutions[key]

    def _all_alike(self) -> Assignment | None:
        """The best of one axis over all ranks, on all axes wherever it may be cut that often."""
        costs, degrees = self.costs, self.costs.degrees
        if costs.loop is not None:
            return None  # which leaves the other beginnings
        flat = Costs(costs.cluster, (math.prod(degrees),))
        if any(None not in pin and len(set(pin)) > 1 for pin in self.pins.values()):
            return None  # axes that are told apart by name
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
            whole = rule.axis_options()[0]
            ways = ((whole,) * at + (option,) * (len(degrees) - at) for at in range(len(degrees) + 1))
            options[node.name] = next(way for way in ways if rule.is_possible(way, degrees))
        leaves = {name: placements * len(degrees) for name, placements in solution.assignment.leaves.items()}
        return Assignment(degrees, leaves, options)

    def _is_loop(self, axis: int) -> bool:
        return axis == 0 and self.costs.loop is not None

    def _axes(self) -> range:
        return range(len(self.costs.degrees))

    def _with_other_whole(self, free: int) -> AllowedOptions:
        """Anything along one axis, along the others whole but for what is pinned."""
        choices = {}
        for node in self._nodes():
            names = self._names(node)
            choices[node] = tuple(
                names
                if axis == free
                or self._is_loop(axis)
                or self._is_pinned(node, axis)
                or self._is_bound(node, axis)
                else {"whole", "R"}
                for axis in self._axes()
            )
        return choices

    def _is_bound(self, node: fx.Node, axis: int) -> bool:
        return node in self.bound and self.bound[node][axis] != ANY

    def _is_pinned(self, node: fx.Node, axis: int) -> bool:
        return any(
            (pin := self.pins.get(tensor.name)) is not None and pin[axis] is not None
            for tensor in (node, *node.users)
        )

    def _with_others_fixed(self, free: int, assignment: Assignment) -> AllowedOptions:
        """Anything along one axis, along the others an assignment as it is."""
        choices = {}
        for node in self._nodes():
            names = self._names(node)
            current = self._option_names(node, assignment)
            choices[node] = tuple(names if axis == free else {current[axis]} for axis in self._axes())
        return choices

    def _among(self, assignments: list[Assignment]) -> AllowedOptions:
        """Whatever some assignment has, or whole."""
        choices: dict[fx.Node, tuple[set[str], ...]] = {}
        for node in self._nodes():
            whole = "whole" if is_operator(node) else "R"
            names_by_assignment = [self._option_names(node, assignment) for assignment in assignments]
            choices[node] = tuple(
                {whole, *(names[axis] for names in names_by_assignment)} for axis in self._axes()
            )
        return choices

    def _nodes(self) -> Iterator[fx.Node]:
        """Operators, parameters and buffers, one of each class: the others lie as it does."""
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
