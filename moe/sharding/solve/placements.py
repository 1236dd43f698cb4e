"""The integer program of a captured graph.

Each option of an operator has a variable. Each use of a tensor has flows from the placement in which the tensor is
computed to the placement that the use needs; uses in the same pass share a move. A tensor that the backward pass needs
is saved in the placement in which the forward pass computed or used it, which costs memory, and is moved from there,
which costs time. All nodes of a class (the same operator of repeated blocks) share one set of variables, counted as
often as there are nodes. Gradients share collectives.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping

from torch import fx

from moe.sharding.capture.capture import CapturedGraph
from moe.sharding.hints.hints import Pin
from moe.sharding.operands import RECOMPUTED, is_operator, operands, result_nodes, shape_of, source
from moe.sharding.placement import WHOLE, Placements
from moe.sharding.propagation.assignment import Assignment
from moe.sharding.rules.rule import Rule, operand_placements, result_placements
from moe.sharding.solve.bound import Bound, allows
from moe.sharding.solve.costs import Costs
from moe.sharding.solve.integer_program import INFINITY, IntegerProgram, Solution
from moe.sharding.solve.solution import MemoryLimits, ShardingSolution, has_no_empty_part, placements_of_stored
from moe.sharding.solve.step_memory import StepMemory
from moe.sharding.solve.variables import Use, Variables
from moe.sharding.solve.waiting import Waiting

AllowedOptions = Mapping[fx.Node, tuple[Container[str], ...]]
"""Restriction of the choice, along each axis: option names of operators, placements of parameters as text."""

_TIE = 1e-11
"""Extra seconds of each option over the one before it, so that ties are broken in the same way everywhere."""


class PlacementProgram:
    """Builds the integer program, and reads the assignment from its solution."""

    def __init__(
        self,
        capture: CapturedGraph,
        costs: Costs,
        rule_of: Callable[[fx.Node], Rule],
        limits: MemoryLimits,
        pins: Mapping[str, Pin] | None = None,
        classes: Mapping[fx.Node, fx.Node] | None = None,
        allowed_options: AllowedOptions | None = None,
        bound: Bound | None = None,
    ) -> None:
        self._capture, self._costs, self._rule_of, self._limits = capture, costs, rule_of, limits
        self._pins, self._allowed_options, self._bounds = pins or {}, allowed_options or {}, bound or {}
        self._graph = capture.graph.graph
        self._backward = capture.backward
        self._class = {node: (classes or {}).get(node, node) for node in self._graph.nodes}
        firsts = (rule_of(node).gradients_of for node in self._graph.nodes if is_operator(node))
        self._gradients = {self._class[node] for node in capture.gradients.values()}
        self._differentiated_classes = {self._class[first] for first in firsts if first is not None}
        self._count: dict[fx.Node, int] = defaultdict(int)
        for node in self._graph.nodes:
            self._count[self._class[node]] += 1
        self._program, self._variables = IntegerProgram(), Variables()
        self._room, self._waiting = StepMemory(self._program), Waiting(self._program, costs.overlap)
        self._replicated: Placements = (WHOLE,) * len(costs.degrees)
        self._build()

    # Variables of operators and leaves

    def _build(self) -> None:
        for node in self._graph.nodes:
            if self._class[node] is not node:
                continue
            if node in self._capture.leaves:
                self._add_leaf(node)
            elif is_operator(node):
                self._add_operator(node)
        for node in self._variables.options:
            self._tie_gradients(node)
        uses = self._uses()
        for tensor, tensor_uses in uses.items():
            self._connect(tensor, tensor_uses)
        self._add_recomputed()

    def _add_leaf(self, node: fx.Node) -> None:
        leaf, count = self._capture.leaves[node], self._count[node]
        itemsize = leaf.dtype.itemsize
        choices = [self._replicated]
        if leaf.kind in ("parameter", "buffer"):
            choices = placements_of_stored(leaf.shape, self._costs.degrees, self._costs.loop is not None)
        choices = [
            placements
            for placements in choices
            if self._is_allowed(node.name, placements)
            and self._is_among(node, map(str, placements))
            and (
                self._pins.get(node.name) is not None or has_no_empty_part(leaf.shape, placements, self._costs.degrees)
            )
        ]
        is_trained = leaf.name in self._capture.gradients and leaf.kind == "parameter"
        slots = self._limits.optimizer_slots
        variables = []
        for number, placements in enumerate(choices):
            part_bytes = self._costs.part_bytes(leaf.shape, itemsize, placements)
            update_s = self._costs.update_s(part_bytes, slots) if is_trained else 0.0
            variable = self._program.variable((update_s + _TIE * number) * count, is_integer=True)
            variables.append((variable, placements))
            if leaf.kind != "input":  # the memory limit already excludes inputs, which are whole
                self._room.hold(variable, part_bytes * (2 + slots if is_trained else 1) * count)
        self._program.equal([(variable, 1.0) for variable, _ in variables], 1.0)
        self._variables.leaves[node] = variables

    def _is_allowed(self, name: str, placements: Placements) -> bool:
        pin = self._pins.get(name)
        return pin is None or all(
            target is None or target == placement for target, placement in zip(pin, placements, strict=True)
        )

    def _is_among(self, node: fx.Node, names: Iterable[str]) -> bool:
        choices = self._allowed_options.get(node)
        return choices is None or all(name in axis_names for name, axis_names in zip(names, choices, strict=True))

    def _add_operator(self, node: fx.Node) -> None:
        count, rule = self._count[node], self._rule_of(node)
        result_names = {number: result.name for result, number in result_nodes(node)}
        choices = [
            choice
            for choice in self._costs.choices(node, rule)
            if self._is_among(node, (option.name for option in choice.options))
            and allows(self._bounds, node, tuple(option.name for option in choice.options))
            and all(
                self._is_allowed(name, result_placements(choice.options, number))
                for number, name in result_names.items()
            )
        ]
        variables = []
        for number, choice in enumerate(choices):
            variable = self._program.variable((choice.seconds + _TIE * number) * count, is_integer=True)
            variables.append((variable, choice))
            arithmetic_s = (choice.seconds - choice.exchange_s) * count
            self._waiting.compute(variable, arithmetic_s, backward=node in self._backward)
            if choice.kept_bytes and self._class[node] in self._differentiated_classes:
                self._room.hold(variable, choice.kept_bytes * count)
            if rule.work != "none":
                for tensor, result_number in result_nodes(node):
                    if self._costs.is_hoisted(placements := result_placements(choice.options, result_number)):
                        self._room.hold(variable, self._bytes(tensor, placements) * count)
        self._program.equal([(variable, 1.0) for variable, _ in variables], 1.0)
        self._room.add_operator((variable, choice.num_bytes) for variable, choice in variables)
        self._variables.options[node] = variables

    def _tie_gradients(self, node: fx.Node) -> None:
        """Give the gradient of an operator the operator's options, if possible: saved tensors would otherwise be
        recomputed."""
        first = self._rule_of(node).gradients_of
        if first is None or self._class.get(first) not in self._variables.options:
            return
        by_names: tuple[dict[tuple[str, ...], int], ...] = tuple(
            {
                tuple(option.name for option in choice.options): variable
                for variable, choice in self._variables.options[operator]
            }
            for operator in (self._class[first], node)
        )
        for names, variable in by_names[0].items():
            if (gradient_variable := by_names[1].get(names)) is not None:
                self._program.row([(gradient_variable, 1.0), (variable, -1.0)], lower=0.0)

    def _add_recomputed(self) -> None:
        """Count the memory of recomputed tensors: those of a block are held together until its gradients are
        computed."""
        blocks: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for node in self._graph.nodes:
            if RECOMPUTED not in node.meta or not is_operator(node) or self._rule_of(node).work == "none":
                continue
            for variable, choice in self._variables.options[self._class[node]]:
                for tensor, number in result_nodes(node):
                    num_bytes = self._bytes(tensor, result_placements(choice.options, number))
                    blocks[node.meta[RECOMPUTED][0]][variable] += num_bytes
        for terms in dict.fromkeys(tuple(block.items()) for block in blocks.values()):
            self._room.add_block(terms)

    # Flows of tensors to their uses

    def _uses(self) -> dict[fx.Node, list[Use]]:
        counts: dict[tuple[fx.Node, fx.Node, int], int] = defaultdict(int)
        for node in filter(is_operator, self._graph.nodes):
            for number, operand in enumerate(operands(node)):
                counts[self._class[operand], self._class[node], number] += 1
        uses: dict[fx.Node, list[Use]] = defaultdict(list)
        for (tensor, user, number), count in counts.items():
            uses[tensor].append(Use(tensor, user, number, count))
        return uses

    def _source_variables(self, tensor: fx.Node) -> dict[Placements, list[int]]:
        """Variables by placements: one of them is 1 if the tensor is computed with these placements."""
        by_placements: dict[Placements, list[int]] = defaultdict(list)
        if tensor in self._variables.leaves:
            for variable, placements in self._variables.leaves[tensor]:
                by_placements[placements].append(variable)
            return by_placements
        maker, number = source(tensor)
        for variable, choice in self._variables.options[self._class[maker]]:
            by_placements[result_placements(choice.options, number)].append(variable)
        return by_placements

    def _use_variables(self, use: Use) -> dict[Placements, list[int]]:
        by_placements: dict[Placements, list[int]] = defaultdict(list)
        for variable, choice in self._variables.options[use.user]:
            by_placements[operand_placements(choice.options, use.operand)].append(variable)
        return by_placements

    def _connect(self, tensor: fx.Node, uses: list[Use]) -> None:
        sources, program = self._source_variables(tensor), self._program
        leaf = self._capture.leaves.get(tensor)
        crosses = tensor not in self._backward
        same_pass_uses = [use for use in uses if (use.user in self._backward) != crosses]
        other_pass_uses = [use for use in uses if use not in same_pass_uses]
        moves, arrivals = self._add_flows(tensor, sources, same_pass_uses)
        self._hold(tensor, moves)
        if not other_pass_uses:
            return
        is_leaf = leaf is not None
        saved_variables: dict[Placements, int] = {}
        kept_variables: dict[Placements, int] = {}
        if not is_leaf:
            for placements in sources:
                variable = program.variable(_TIE)
                saved_variables[placements] = variable
                if not self._costs.is_hoisted(placements):
                    self._room.hold(variable, self._bytes(tensor, placements) * self._count[tensor])
        for placements, flows in arrivals.items():
            variable = program.variable(_TIE, is_integer=True)
            kept_variables[placements] = variable
            if not self._costs.is_hoisted(placements):
                self._room.hold(variable, self._bytes(tensor, placements) * self._count[tensor])
            program.row([(variable, 1.0), *((flow, -1.0) for flow in flows)], upper=0.0)
            self._variables.kept_tensors[tensor, placements] = variable
        moves, _ = self._add_flows(tensor, sources, other_pass_uses, saved_variables, kept_variables)
        self._hold(tensor, moves)

    def _is_stored(self, tensor: fx.Node) -> bool:
        """Whether a tensor exists before the step begins, so that it may be gathered early."""
        leaf = self._capture.leaves.get(tensor)
        return leaf is not None and leaf.kind in ("parameter", "buffer")

    def _moving(
        self, tensor: fx.Node, before: Placements, after: Placements, count: int, in_backward: bool | None
    ) -> int:
        """A variable that is 1 if the tensor moves. `in_backward`: whether the move overlaps with the arithmetic of the
        backward pass, rather than the forward pass; None if it overlaps with nothing."""
        if before == after:
            return self._program.variable()
        itemsize = tensor.meta["val"].dtype.itemsize
        is_bucketed = tensor in self._gradients
        seconds = count * self._costs.move_s(shape_of(tensor), itemsize, before, after, is_bucketed)
        if in_backward is None:
            return self._program.variable(seconds)
        return self._waiting.exchange(seconds, backward=in_backward)

    def _hold(self, tensor: fx.Node, moves: Mapping[Placements, list[int]]) -> None:
        """Count the memory of tensors that are gathered before a loop: they are held until its end."""
        for placements, ways in moves.items():
            if self._costs.is_hoisted(placements):
                num_bytes = self._bytes(tensor, placements) * self._count[tensor]
                for way in ways:
                    self._room.hold(way, num_bytes)

    def _bytes(self, tensor: fx.Node, placements: Placements) -> int:
        value = tensor.meta["val"]
        return self._costs.part_bytes(value.shape, value.dtype.itemsize, placements)

    def _add_flows(
        self,
        tensor: fx.Node,
        sources: Mapping[Placements, list[int]],
        uses: list[Use],
        saved_variables: Mapping[Placements, int] | None = None,
        kept_variables: Mapping[Placements, int] | None = None,
    ) -> tuple[dict[Placements, list[int]], dict[Placements, list[int]]]:
        """Add the flows of a tensor from the placements in which it is computed to those that its uses need. Returns,
        by each other placement, (variables that are 1 if the tensor is moved there, flows that use it there). Flows of
        several uses share a move."""
        program, is_stored = self._program, self._is_stored(tensor)

        def moving(before: Placements, after: Placements, use: Use) -> int:
            in_backward = use.user in self._backward if is_stored else None
            return self._moving(tensor, before, after, use.count, in_backward)

        moves: dict[Placements, list[int]] = defaultdict(list)
        arrivals: dict[Placements, list[int]] = defaultdict(list)
        shared_moves: dict[tuple[Placements, Placements], int] = {}
        is_shared = len(uses) > 1
        for use in uses:
            targets = self._use_variables(use)
            outflows: dict[Placements, list[int]] = defaultdict(list)
            inflows: dict[Placements, list[int]] = defaultdict(list)
            for before in sources:
                for after in targets:
                    flow = program.variable() if is_shared else moving(before, after, use)
                    outflows[before].append(flow)
                    inflows[after].append(flow)
                    if before == after:
                        continue
                    arrivals[after].append(flow)
                    if not is_shared:
                        moves[after].append(flow)
                        continue
                    if (before, after) not in shared_moves:
                        shared_moves[before, after] = moving(before, after, use)
                        moves[after].append(shared_moves[before, after])
                    program.row([(shared_moves[before, after], 1.0), (flow, -1.0)], lower=0.0)
            for after, takers in targets.items():
                terms = [*((flow, 1.0) for flow in inflows[after]), *((taker, -1.0) for taker in takers)]
                if kept_variables is not None and after in kept_variables:
                    kept_flow = program.variable()
                    terms.append((kept_flow, 1.0))
                    program.row([(kept_variables[after], 1.0), (kept_flow, -1.0)], lower=0.0)
                program.equal(terms, 0.0)
            for before, makers in sources.items():
                program.row(
                    [*((flow, 1.0) for flow in outflows[before]), *((maker, -1.0) for maker in makers)], upper=0.0
                )
                if saved_variables:
                    program.row(
                        [(saved_variables[before], 1.0), *((flow, -1.0) for flow in outflows[before])], lower=0.0
                    )
        return moves, arrivals

    # Solution

    def solve(self, max_s: float = INFINITY, *, quick: bool = False) -> ShardingSolution | None:
        """The cheapest assignment, or with `quick` one close to it; None if none fits in memory, or if all cost more
        than `max_s` seconds."""
        self._end_results()
        self._room.limit(self._limits.memory_bytes)
        self._waiting.end()
        solution = self._program.solve(max_s, quick=quick)
        return None if solution is None else self._read(solution)

    def _end_results(self) -> None:
        """Fix the placements of results: outputs are whole; gradients and new values of buffers have the placements of
        their parameters and buffers."""
        replicated: dict[Placements, list[int]] = {self._replicated: []}
        for output in self._capture.outputs:
            if isinstance(output, fx.Node):
                self._deliver(self._class[output], replicated, 1, None)
        by_name = {leaf.name: node for node, leaf in self._capture.leaves.items()}
        counts: dict[tuple[fx.Node, fx.Node, bool | None], int] = defaultdict(int)
        for results, in_backward in ((self._capture.gradients, True), (self._capture.updates, None)):
            for name, node in results.items():
                counts[self._class[node], self._class[by_name[name]], in_backward] += 1
        for (node, leaf, in_backward), count in counts.items():
            targets: dict[Placements, list[int]] = defaultdict(list)
            for variable, placements in self._variables.leaves[leaf]:
                targets[placements].append(variable)
            self._deliver(node, targets, count, in_backward)

    def _deliver(
        self, tensor: fx.Node, targets: Mapping[Placements, list[int]], count: int, in_backward: bool | None
    ) -> None:
        program, sources = self._program, self._source_variables(tensor)
        outflows: dict[Placements, list[int]] = defaultdict(list)
        for after, takers in targets.items():
            inflows = []
            for before in sources:
                flow = self._moving(tensor, before, after, count, in_backward)
                if self._costs.loop is not None and before[1:] != after[1:]:  # accumulated as it is computed
                    self._room.hold(flow, self._bytes(tensor, before) * count)
                inflows.append((flow, 1.0))
                outflows[before].append(flow)
            if takers:
                program.equal([*inflows, *((taker, -1.0) for taker in takers)], 0.0)
            else:
                program.equal(inflows, 1.0)
        for before, makers in sources.items():
            program.row([*((flow, 1.0) for flow in outflows[before]), *((maker, -1.0) for maker in makers)], upper=0.0)

    def _read(self, solution: Solution) -> ShardingSolution:
        values = solution.values
        choices = {
            node: next(choice for variable, choice in variables if values[variable] > 0.5)
            for node, variables in self._variables.options.items()
        }
        leaf_placements = {
            node: next(placements for variable, placements in variables if values[variable] > 0.5)
            for node, variables in self._variables.leaves.items()
        }
        kept_tensors = {key for key, variable in self._variables.kept_tensors.items() if values[variable] > 0.5}
        nodes = list(self._graph.nodes)
        assignment = Assignment(
            self._costs.degrees,
            {node.name: leaf_placements[self._class[node]] for node in nodes if node in self._capture.leaves
             and self._capture.leaves[node].kind not in ("input", "tangent")},
            {node.name: choices[self._class[node]].options for node in nodes if is_operator(node)},
            frozenset((node.name, placements)
                      for node in nodes for tensor, placements in kept_tensors if self._class[node] is tensor),
        )  # fmt: skip
        return ShardingSolution(
            assignment, solution.objective, self._room.used_bytes(values), solution.lower_bound, solution.was_integral,
            self._program.num_variables, self._room.largest_bytes(values),
        )  # fmt: skip
