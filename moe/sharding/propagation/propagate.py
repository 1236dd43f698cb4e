"""Propagation: from hints to every tensor, without a search (GShard, arXiv 2006.16668, section 3.3.3).

If a tensor is split, the operators that use or compute it split the same factor, and so do their other tensors that
have the factor. This is done in rounds, as in Shardy: first through pointwise operators and views; then through
products along dimensions that all their tensors have; then along all other dimensions. If two hints require different
splits of an operator, it follows the one that arrived first, or that of the larger tensor, and the other tensor is
moved: both hints are reported.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import fx

from moe.sharding.capture.capture import CapturedGraph
from moe.sharding.hints.hints import Pin
from moe.sharding.operands import is_operator, operands, result_nodes, shape_of
from moe.sharding.placement import WHOLE, AxisPlacement, Placements
from moe.sharding.propagation.assignment import Assignment
from moe.sharding.rules.rule import AxisOption, Factor, Rule

ROUNDS = 3


@dataclass(frozen=True)
class HintConflict:
    """An operator for which two hints require different splits."""

    line: str
    axis: int
    followed_hint: str
    """The hint that the operator follows."""
    other_hint: str
    """The hint of the tensor that is moved."""


@dataclass(frozen=True)
class PropagationResult:
    """Placements that follow from hints."""

    assignment: Assignment
    conflicts: tuple[HintConflict, ...]


class _KnownPlacements:
    """Placements of tensors that are known so far, axis by axis, with the hint that each follows from."""

    def __init__(self, num_axes: int) -> None:
        self._num_axes = num_axes
        self.placements: dict[fx.Node, list[AxisPlacement | None]] = {}
        self.sources: dict[tuple[fx.Node, int], str] = {}

    def placement(self, tensor: fx.Node, axis: int) -> AxisPlacement | None:
        return self.placements.get(tensor, [None] * self._num_axes)[axis]

    def learn(self, tensor: fx.Node, axis: int, placement: AxisPlacement, source: str) -> None:
        self.placements.setdefault(tensor, [None] * self._num_axes)[axis] = placement
        self.sources[tensor, axis] = source


class Propagation:
    """Propagation of hints in one captured graph, on one mesh."""

    def __init__(
        self,
        capture: CapturedGraph,
        rule_of: Callable[[fx.Node], Rule],
        degrees: Sequence[int],
        pins: Mapping[str, Pin],
        hint_texts: Mapping[str, str],
    ) -> None:
        self._capture, self._rule_of, self._degrees = capture, rule_of, tuple(degrees)
        self._pins = pins
        self._placements = _KnownPlacements(len(self._degrees))
        self._options: dict[fx.Node, list[AxisOption | None]] = {}
        self._conflicts: dict[tuple[str, int], HintConflict] = {}
        self._operators = [node for node in capture.graph.graph.nodes if is_operator(node)]
        self._results = {node: result_nodes(node) for node in self._operators}
        for node in capture.graph.graph.nodes:
            for axis, placement in enumerate(pins.get(node.name, ())):
                if placement is not None:
                    self._placements.learn(node, axis, placement, hint_texts.get(node.name, node.name))

    def run(self) -> PropagationResult:
        for round_ in range(ROUNDS):
            while self._pass_on(round_):
                pass
        return PropagationResult(self._assignment(), tuple(self._conflicts.values()))

    def _pass_on(self, round_: int) -> bool:
        """Have all operators follow the known placements. Returns whether any placement was learned."""
        has_changed = False
        for node in self._operators:
            for axis in self._axes():
                has_changed |= self._follow(node, axis, round_)
        return has_changed

    def _axes(self) -> range:
        return range(len(self._degrees))

    def _follow(self, node: fx.Node, axis: int, round_: int) -> bool:
        """Have an operator split the factor in which its tensors are known to be split. Returns whether any placement
        was learned."""
        if self._degrees[axis] == 1:
            return False
        rule = self._rule_of(node)
        if self._options.get(node, [None] * len(self._degrees))[axis] is None:
            option = self._best_option(node, rule, axis, round_)
            if option is None:
                return False
            self._options.setdefault(node, [None] * len(self._degrees))[axis] = option
        axis_option = self._options[node][axis]
        assert axis_option is not None
        source = self._source(node, axis_option, axis)
        has_changed = False
        for number, operand in enumerate(operands(node)):
            has_changed |= self._learn(node, operand, axis, axis_option.operands[number], source)
        for tensor, number in self._results[node]:
            has_changed |= self._learn(node, tensor, axis, axis_option.results[number], source)
        return has_changed

    def _best_option(self, node: fx.Node, rule: Rule, axis: int, round_: int) -> AxisOption | None:
        """The option that agrees with the most known placements."""
        tensors = [*operands(node), *(tensor for tensor, _ in self._results[node])]
        if not any(
            (known_placement := self._placements.placement(tensor, axis)) is not None
            and known_placement.dim is not None
            for tensor in tensors
        ):
            return None
        best: tuple[tuple[int, int], AxisOption] | None = None
        for option in rule.axis_options():
            if not self._is_of_round(node, rule, option, round_) or not self._is_possible(node, rule, axis, option):
                continue
            num_matches = elements = 0
            for tensor, placement in self._option_placements(node, option):
                if placement.dim is not None and self._placements.placement(tensor, axis) == placement:
                    num_matches += 1
                    elements += prod(shape_of(tensor))
            if num_matches and (best is None or (num_matches, elements) > best[0]):
                best = (num_matches, elements), option
        return None if best is None else best[1]

    def _is_of_round(self, node: fx.Node, rule: Rule, option: AxisOption, round_: int) -> bool:
        if option.factor is None and option.exchange is None and option not in rule.extra_options:
            return False
        if not rule.is_product or round_ == ROUNDS - 1:
            return True
        return round_ > 0 and option.factor is not None and _is_everywhere(rule, option.factor)

    def _is_possible(self, node: fx.Node, rule: Rule, axis: int, option: AxisOption) -> bool:
        options = list(self._options.get(node, [None] * len(self._degrees)))
        options[axis] = option
        whole_option = rule.axis_options()[0]
        if not rule.is_possible([choice or whole_option for choice in options], self._degrees):
            return False
        for tensor, number in self._results[node]:
            pin = self._pins.get(tensor.name)
            if pin is not None and pin[axis] is not None and pin[axis] != option.results[number]:
                return False
        return True

    def _option_placements(self, node: fx.Node, option: AxisOption) -> list[tuple[fx.Node, AxisPlacement]]:
        operand_placements = list(zip(operands(node), option.operands, strict=True))
        return operand_placements + [(tensor, option.results[number]) for tensor, number in self._results[node]]

    def _source(self, node: fx.Node, option: AxisOption, axis: int) -> str:
        for tensor, placement in self._option_placements(node, option):
            if placement.dim is not None and self._placements.placement(tensor, axis) == placement:
                return self._placements.sources[tensor, axis]
        return node.name

    def _learn(self, node: fx.Node, tensor: fx.Node, axis: int, placement: AxisPlacement, source: str) -> bool:
        known_placement = self._placements.placement(tensor, axis)
        if known_placement is None and placement.dim is not None and self._fits(tensor, axis, placement.dim):
            self._placements.learn(tensor, axis, placement, source)
            return True
        if known_placement is not None and known_placement.dim is not None and known_placement != placement:
            other_source = self._placements.sources[tensor, axis]
            line = node.meta.get("line") or node.name
            if other_source != source:
                self._conflicts.setdefault((line, axis), HintConflict(line, axis, source, other_source))
        return False

    def _fits(self, tensor: fx.Node, axis: int, dim: int) -> bool:
        """Whether each part of the dimension has at least one element."""
        parts = self._degrees[axis]
        for other_axis, placement in enumerate(self._placements.placements.get(tensor, ())):
            if placement is not None and placement.dim == dim:
                parts *= self._degrees[other_axis]
        return shape_of(tensor)[dim] >= parts

    def _assignment(self) -> Assignment:
        options = {}
        for node in self._operators:
            rule = self._rule_of(node)
            whole_option = rule.axis_options()[0]
            axis_options = tuple(
                option or whole_option for option in self._options.get(node, [None] * len(self._degrees))
            )
            options[node.name] = self._apply_pins(node, rule, axis_options)
        leaves = {
            node.name: self._leaf(node)
            for node, leaf in self._capture.leaves.items()
            if leaf.kind not in ("input", "tangent")
        }
        return Assignment(self._degrees, leaves, options)

    def _apply_pins(self, node: fx.Node, rule: Rule, axis_options: tuple[AxisOption, ...]) -> tuple[AxisOption, ...]:
        """The options, changed where a result does not have its pinned placement."""
        pinned_options = list(axis_options)
        for tensor, number in self._results[node]:
            for axis, placement in enumerate(self._pins.get(tensor.name, ())):
                if placement is None or pinned_options[axis].results[number] == placement:
                    continue
                for option in rule.axis_options():
                    attempt = [*pinned_options[:axis], option, *pinned_options[axis + 1 :]]
                    if option.results[number] == placement and rule.is_possible(attempt, self._degrees):
                        pinned_options = attempt
                        break
        if rule.by_axis:
            by_name = {option.name: option for option in rule.axis_options()}
            return tuple(by_name[name] for name in rule.by_axis)
        return tuple(pinned_options)

    def _leaf(self, node: fx.Node) -> Placements:
        return tuple(
            placement if placement is not None and placement.dim is not None else WHOLE
            for placement in (self._placements.placement(node, axis) for axis in self._axes())
        )


def _is_everywhere(rule: Rule, factor: Factor) -> bool:
    return all(any(factor in dim for dim in dims) for dims in (*rule.operands, *rule.results))


def conflicts_in_words(conflicts: Sequence[HintConflict], axes: Sequence[str]) -> list[str]:
    return [
        f"{conflict.line}: over {axes[conflict.axis]} it follows {conflict.followed_hint}; "
        f"the tensor of {conflict.other_hint} is brought to it"
        for conflict in conflicts
    ]
