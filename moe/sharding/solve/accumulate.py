"""Micro-batches: the option that each operator has along a loop over parts of the batch.

The loop is a mesh axis whose ranks are the same device, one after the other. Operators follow the same rules as along
any axis, but nothing can be exchanged along this one: an operand is used in the placement in which it was computed, or
as a slice of a whole tensor.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import fx

from moe.sharding.capture.capture import CapturedGraph
from moe.sharding.hints.hints import Pin
from moe.sharding.operands import is_operator, operands, shape_of, source
from moe.sharding.placement import WHOLE, AxisPlacement, split
from moe.sharding.propagation.assignment import Assignment
from moe.sharding.rules import manual
from moe.sharding.rules.rule import AxisOption, Rule
from moe.spec import SpecError, spec_error

Loop = Mapping[fx.Node, AxisOption]
"""Options of all operators along a loop over micro-batches."""

AXIS = "micro_batch"
"""Name of the loop among the mesh's axes."""


def loop_of(capture: CapturedGraph, rule_of: Callable[[fx.Node], Rule], micro_batches: int) -> Loop:
    """The loop over this number of parts of the batch, which is dimension 0 of the inputs.

    Raises SpecError, naming the user's line, for an operator that needs the whole batch at once, and for outputs that
    need gradients and are not the loss.
    """
    _check_outputs(capture, micro_batches)
    inputs = [node for node, leaf in capture.leaves.items() if leaf.kind == "input" and leaf.shape]
    if not inputs or shape_of(inputs[0])[0] < micro_batches:
        size = shape_of(inputs[0])[0] if inputs else 0
        rule, remedy = f"must be at most the batch size (={size})", "use fewer, or a larger batch"
        raise spec_error("out_of_range", "micro_batches", micro_batches, rule, remedy)
    alike = [node for node in inputs if shape_of(node)[0] == shape_of(inputs[0])[0]]
    single_inputs = sorted(alike, key=lambda node: -_size_in_memory(node)) if len(alike) > 1 else []
    first_error: SpecError | None = None
    # if one input alone is split, the others are the same for all micro-batches
    for split_inputs in (alike, *([node] for node in single_inputs)):
        try:
            options = _AccumulationOptions(capture, rule_of, micro_batches, split_inputs)
            loop = options.solve()
        except SpecError as error:
            first_error = first_error or error
            continue
        if options.is_cut():
            return loop
    if first_error is None:
        rule, remedy = "has no effect: no result depends on the batch", "use micro_batches=1"
        raise spec_error("not_applicable", "micro_batches", micro_batches, rule, remedy)
    raise first_error


def _size_in_memory(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.dtype.itemsize


def pins_in_loop(pins: Mapping[str, Pin]) -> dict[str, Pin]:
    """Pins on a mesh whose axis 0 is a loop."""
    return {name: (None, *pin) for name, pin in pins.items()}


def in_loop(assignment: Assignment, loop: Loop, micro_batches: int) -> Assignment:
    """The assignment with the loop as a new axis 0."""
    by_name = {node.name: option for node, option in loop.items()}
    return Assignment(
        (micro_batches, *assignment.degrees),
        {name: (WHOLE, *placements) for name, placements in assignment.leaves.items()},
        {name: (by_name[name], *options) for name, options in assignment.options.items()},
    )


def classes_of(loop: Loop, pins: Mapping[str, Pin]) -> dict[str, tuple[str | None, Pin | None]]:
    """Keys that are equal for nodes of one class, which also have the same operator and arguments: option in the loop,
    and pin."""
    classes: dict[str, tuple[str | None, Pin | None]] = {name: (None, pin) for name, pin in pins.items()}
    return classes | {node.name: (option.name, pins.get(node.name)) for node, option in loop.items()}


def _check_outputs(capture: CapturedGraph, micro_batches: int) -> None:
    tangents = [leaf for leaf in capture.leaves.values() if leaf.kind == "tangent"]
    if len(tangents) > 1 or any(leaf.shape for leaf in tangents):
        names = ", ".join(f"{leaf.name} {list(leaf.shape)}" for leaf in tangents)
        rule = f"requires a scalar loss as the only output with gradients (found {names})"
        remedy = "return the loss alone, or detach the other outputs"
        raise spec_error("unsupported", "micro_batches", micro_batches, rule, remedy)


_INDEPENDENCE_REMEDY = (
    'make samples independent: group or layer norm, a loss with reduction="sum" divided by a constant, a batch size '
    "that micro_batches divides; or use micro_batches=1"
)


class _AccumulationOptions:
    def __init__(
        self, capture: CapturedGraph, rule_of: Callable[[fx.Node], Rule], micro_batches: int, inputs: Sequence[fx.Node]
    ) -> None:
        self._capture, self._rule_of, self._degrees = capture, rule_of, (micro_batches,)
        self._placements: dict[fx.Node, AxisPlacement] = dict.fromkeys(capture.leaves, WHOLE)
        self._placements |= dict.fromkeys(inputs, split(0))
        self._options: dict[fx.Node, AxisOption] = {}

    def solve(self) -> Loop:
        operators = [node for node in self._capture.graph.graph.nodes if is_operator(node)]
        for node in operators:
            self._choose(node, self._choose_option(node))
        results = {output for output in self._capture.outputs if isinstance(output, fx.Node)}
        results |= {*self._capture.updates.values(), *self._capture.gradients.values()}
        for node in reversed(operators):
            if node not in results:
                self._make_parts(node)
        return self._options

    def is_cut(self) -> bool:
        """Whether any gradient (any output, if there are no gradients) differs between micro-batches."""
        results = [*self._capture.gradients.values()] or [
            output for output in self._capture.outputs if isinstance(output, fx.Node)
        ]
        return any(self._placements[result] != WHOLE for result in results)

    def _choose_option(self, node: fx.Node) -> AxisOption:
        """The option that uses operands in the placements in which they were computed, or else slices the fewest."""
        if node.target in manual.TARGETS:
            raise self._unsupported_error(node, "is a manual part for the whole batch")
        placements = [self._placements[operand] for operand in operands(node)]
        whole_option, *splits = self._rule_of(node).axis_options()
        if all(placement == WHOLE for placement in placements):
            return whole_option
        candidates = [option for option in splits if self._is_possible(node, option)]
        if not candidates and self._rule_of(node).work == "none":
            raise self._unsupported_error(
                node,
                "merges the batch dimension with one before it",
                "keep the batch first (torch's transformer and recurrent layers transpose it inside), or use "
                "recompute=True or micro_batches=1",
            )
        if not candidates:
            partial = next((placement for placement in placements if placement.combine is not None), None)
            raise self._unsupported_error(
                node,
                f"needs the whole batch: it uses a {partial.combine} over the batch before it is complete"
                if partial is not None
                else "needs the whole batch: it cannot run on some of the rows",
            )
        return min(candidates, key=lambda option: sum(w != m for w, m in zip(option.operands, placements, strict=True)))

    def _is_possible(self, node: fx.Node, option: AxisOption) -> bool:
        """Whether an option needs no exchange."""
        return (
            option.exchange is None
            and self._rule_of(node).is_possible((option,), self._degrees)
            and all(
                self._placements[operand] in (WHOLE, placement)
                for operand, placement in zip(operands(node), option.operands, strict=True)
            )
        )

    def _make_parts(self, node: fx.Node) -> None:
        """Have a tensor computed part by part, if it is the same for all micro-batches but each uses its own part."""
        if self._options[node].name != "whole" or isinstance(node.meta["val"], list | tuple) or not node.users:
            return
        uses = {
            self._options[user].operands[number]
            for user in node.users
            if is_operator(user)
            for number, operand in enumerate(operands(user))
            if operand is node
        }
        if len(uses) != 1 or (placement := uses.pop()).dim is None:
            return
        for option in self._rule_of(node).axis_options():
            if (
                option.factor is not None
                and option.results[0] == placement
                and self._is_possible(node, option)
                and not self._is_of_parameters(node)
            ):
                self._choose(node, option)
                return

    def _is_of_parameters(self, node: fx.Node) -> bool:
        """Whether an operand is a parameter or buffer: gathering it takes an exchange, which is made once."""
        kinds = {self._capture.leaves[operand].kind for operand in operands(node) if operand in self._capture.leaves}
        return bool(kinds & {"parameter", "buffer"})

    def _choose(self, node: fx.Node, option: AxisOption) -> None:
        self._options[node] = option
        if not isinstance(node.meta["val"], list | tuple):
            self._placements[node] = option.results[0]
        for user in node.users:
            if not is_operator(user) and user.op == "call_function":
                self._placements[user] = option.results[source(user)[1]]

    def _unsupported_error(self, node: fx.Node, rule: str, remedy: str = _INDEPENDENCE_REMEDY) -> SpecError:
        (count,) = self._degrees
        line = node.meta.get("line") or node.name
        return spec_error("unsupported", line, str(node.target), f"{rule} (micro_batches={count})", remedy)
