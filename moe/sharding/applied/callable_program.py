"""Program of a plan, with the structure of its batch and results."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from moe.sharding.applied.accumulation import AccumulationPrograms, steps_of
from moe.sharding.applied.batch import leaves_of
from moe.sharding.capture.capture import TENSOR, CapturedGraph
from moe.sharding.exchange.moves import Moves
from moe.sharding.operands import is_operator
from moe.sharding.partition.buckets import put_in_buckets, with_buckets
from moe.sharding.partition.program import Partitioner, Program, compile_program, drop_backward
from moe.sharding.placement import WHOLE
from moe.sharding.plan_records import parse_placements
from moe.sharding.propagation.annotated_graph import AnnotatedGraph, annotate_graph
from moe.sharding.propagation.assignment import Assignment
from moe.sharding.rules.registry import Rules
from moe.sharding.rules.rule import AxisOption
from moe.sharding.sharding_plan import ShardingPlan
from moe.sharding.solve.recompute import recompute_blocks, recompute_checkpointed
from moe.spec import spec_error


@dataclass(frozen=True, eq=False)
class CallableProgram:
    """A program, with the structure of its batch and results."""

    program: Program
    tree: pytree.TreeSpec
    """Structure of the module's result."""
    values: tuple[Any, ...]
    """Flattened result of the module, with `TENSOR` in place of tensors."""
    batch: tuple[Any, ...]
    """Leaves of the batch: (shape, dtype) of tensors, and other values."""
    batch_tree: pytree.TreeSpec
    """Structure of the batch."""
    steps: AccumulationPrograms | None = None
    """Loops over micro-batches, if the plan has them."""
    options: dict[str, Any] | None = None
    """Options of `torch.compile`; None if the program is not compiled."""

    @cached_property
    def running(self) -> Program:
        """The program, compiled if `options` are set."""
        return self._compile(self.program)

    @cached_property
    def forward_only(self) -> Program:
        """The forward pass for calls without a backward pass, compiled if `options` are set."""
        return self._compile(drop_backward(self.program))

    def _compile(self, program: Program) -> Program:
        return program if self.options is None else compile_program(program, **self.options)


def make_callable(
    capture: CapturedGraph, program: Program, plan: ShardingPlan, batch: Sequence[Any]
) -> CallableProgram:
    """The callable program of a plan; with micro-batches, its loops."""
    steps = None
    if plan.micro_batches > 1:
        steps = steps_of(program, capture, plan.micro_batches)
        program = replace(
            program, placements={name: tensor_placements[1:] for name, tensor_placements in program.placements.items()}
        )
        for graph in steps.graphs:
            put_in_buckets(graph, (plan.micro_batches, *plan.degrees))
    values = tuple(TENSOR if isinstance(output, fx.Node) else output for output in capture.outputs)
    tree = pytree.tree_structure(list(batch))
    return CallableProgram(program, capture.output_tree, values, leaves_of(batch), tree, steps)


def program_of(capture: CapturedGraph, plan: ShardingPlan, replicate: Sequence[str] = ()) -> Program:
    """The program of a plan for a graph, which is changed: hints become annotations. With micro-batches, the loop over
    them is axis 0 of its mesh. Raises SpecError for choices that are not possible."""
    prepare(capture, plan)
    return write_program(capture, plan, Rules(replicate, capture.parts, plan.mesh))


def prepare(capture: CapturedGraph, plan: ShardingPlan) -> AnnotatedGraph:
    """The hints of a plan in a captured graph, which is changed to the graph of the plan: with annotations and
    recomputation."""
    hints = annotate_graph(capture, plan.hints)
    recompute_checkpointed(capture)
    if plan.recompute:
        recompute_blocks(capture)
    return hints


def write_program(capture: CapturedGraph, plan: ShardingPlan, rules: Rules) -> Program:
    """The program of a plan for a prepared graph. Raises SpecError for choices that are not possible."""
    degrees, is_loop = plan.degrees, plan.micro_batches > 1
    if is_loop:
        degrees = (plan.micro_batches, *degrees)
    assignment = _assignment(capture, plan, degrees, rules)
    program = Partitioner(capture, assignment, rules, Moves(plan.cluster, degrees, is_loop)).program()
    return program if is_loop else with_buckets(program, degrees)


def _assignment(capture: CapturedGraph, plan: ShardingPlan, degrees: tuple[int, ...], rules: Rules) -> Assignment:
    """The plan's choices. Raises SpecError for one that is not possible."""
    options = {}
    for node in capture.graph.graph.nodes:
        if not is_operator(node):
            continue
        by_name: dict[str, AxisOption] = {option.name: option for option in rules(node).axis_options()}
        names = plan.options.get(node.name, ())
        if len(names) != len(degrees) or not set(names) <= set(by_name):
            rule, remedy = f"must be one option of {node.target} (={', '.join(by_name)}) per mesh axis", "plan again"
            raise spec_error("not_a_choice", f"plan.options.{node.name}", names, rule, remedy)
        options[node.name] = tuple(by_name[name] for name in names)
        if not rules(node).is_possible(options[node.name], degrees):
            rule, remedy = f"cannot be combined for {node.target} on {plan.mesh}", "plan again"
            raise spec_error("conflict", f"plan.options.{node.name}", names, rule, remedy)
    leaves = {
        node.name: (WHOLE,) * (len(degrees) - len(plan.mesh)) + parse_placements(plan.parameters[leaf.name])
        for node, leaf in capture.leaves.items()
        if leaf.kind in ("parameter", "buffer")
    }
    kept_tensors = frozenset((name, parse_placements(placements)) for name, placements in plan.kept)
    return Assignment(degrees, leaves, options, kept_tensors)
