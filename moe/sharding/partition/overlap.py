"""Overlap of exchanges with computation. An all-to-all starts as soon as its operand is computed, and the program
waits for it at the first use of its result. In the meantime it runs calls of the same block that do not depend on the
all-to-all: those that stood before it, and the branch that is first combined with its result, such as a shared expert
next to routed ones. At most two reductions and two all-to-alls are in flight at a time: each holds its operand until
the wait."""

from collections.abc import Iterable
from operator import getitem

from torch import fx

from moe.sharding.exchange import exchange, joint
from moe.sharding.lines import BLOCK
from moe.sharding.operands import RECOMPUTED
from moe.sharding.partition import runtime
from moe.sharding.rules import differentiable

MAX_IN_FLIGHT = 2
"""Maximum number of reductions in flight at a time, and of all-to-alls."""

_REDUCTIONS = (
    exchange.begin_all_reduce,
    exchange.begin_reduce_scatter,
    joint.begin_all_reduces,
    joint.begin_reduce_scatters,
)
_ALL_TO_ALLS = (exchange.begin_all_to_all, differentiable.begin_forward, differentiable.begin_forward_kept)
"""Starts of all-to-alls, and of operators that begin with one."""
_LOCAL = (runtime.first, runtime.valid, runtime.zero_other_ranks)
"""Calls that take the mesh but do not communicate."""


def finish_in_turn(graph: fx.Graph) -> None:
    """Keep at most two reductions and two all-to-alls in flight, in place: wait for the oldest before a third starts,
    which frees its input."""
    for kind in (_REDUCTIONS, _ALL_TO_ALLS):
        position = _positions(graph)
        in_flight: list[fx.Node] = []
        for start in [node for node in graph.nodes if node.target in kind and len(node.users) == 1]:
            if len(in_flight) == MAX_IN_FLIGHT:
                (wait,) = in_flight.pop(0).users
                if position[wait] > position[start]:
                    for node in _wait_and_items(wait):
                        start.prepend(node)
            in_flight.append(start)
    graph.lint()


def begin_all_to_alls(graph: fx.Graph) -> None:
    """Split each all-to-all of a program, in place, into its start and a later wait; operators that begin with an
    all-to-all are two calls already. All ranks have the same program, so the order of collectives stays the same on
    all of them."""
    _split(graph)
    pairs = [(start, wait) for start in graph.nodes if start.target in _ALL_TO_ALLS for wait in start.users]
    for start, _ in pairs:
        _delay_independent_calls(graph, start)
    for start, wait in pairs:
        _wait_at_first_use(graph, wait)
        _bring_branch_ahead(graph, start, wait)
    graph.lint()


def _split(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=exchange.all_to_all):
        if node.users:
            with graph.inserting_before(node):
                start = graph.call_function(exchange.begin_all_to_all, node.args, node.kwargs)
            start.meta.update(node.meta)
            node.target, node.args, node.kwargs = exchange.finish, (start,), {}
            node.meta.pop("move", None)


def _delay_independent_calls(graph: fx.Graph, start: fx.Node) -> None:
    """Move calls of the same region from before `start` to after it, in their order, unless `start` depends on them or
    a call that is not moved does."""
    nodes = list(graph.nodes)
    preceding = nodes[: nodes.index(start)]
    # the list of arguments is emptied once, before all calls that may move
    num_arguments = max((index + 1 for index, node in enumerate(preceding) if node.op == "call_method"), default=1)
    operands, region = _with_operands([start]), _region(start)
    immobile = set(preceding[:num_arguments])
    for node in reversed(preceding[num_arguments:]):
        is_movable = node.op == "call_function" and node not in operands and _region(node) == region
        if not is_movable or not immobile.isdisjoint(node.users):
            immobile.add(node)
    last = start
    for node in preceding[num_arguments:]:
        if node not in immobile:
            last.append(node)
            last = node


def _wait_at_first_use(graph: fx.Graph, wait: fx.Node) -> None:
    position, results = _positions(graph), _wait_and_items(wait)
    users = {user for node in results for user in node.users}.difference(results)
    if users:
        first = min(users, key=position.__getitem__)
        for node in results:
            first.prepend(node)


def _bring_branch_ahead(graph: fx.Graph, start: fx.Node, wait: fx.Node) -> None:
    """Find the first call that combines the exchange's result with an independent branch, and move the calls of that
    branch that lie in the same region ahead of the wait. Calls that communicate, and calls that depend on these, are
    not moved."""
    nodes = list(graph.nodes)
    mesh, region = nodes[0], _region(start)
    dependents = {wait}
    immobile: set[fx.Node] = set()
    branch: dict[fx.Node, None] = {}
    for node in nodes[nodes.index(wait) + 1 :]:
        inputs = node.all_input_nodes
        if not dependents.isdisjoint(inputs):
            if node.op == "call_function" and not branch.keys().isdisjoint(inputs):
                operands = _with_operands(branch.keys() & set(inputs))
                for call in branch:
                    if call in operands:
                        wait.prepend(call)
                return
            dependents.add(node)
        elif (
            node.op == "call_function"
            and immobile.isdisjoint(inputs)
            and (mesh not in inputs or node.target in _LOCAL)
            and node.target is not differentiable.finish
            and (node.target is getitem or _region(node) == region)
        ):
            branch[node] = None
        else:
            immobile.add(node)


def _region(node: fx.Node) -> tuple[str | None, str | None]:
    """Region that a call may not leave: its block, and the block recomputed with it, if any. If a block were recomputed
    earlier, or its gradients computed later, its activations would be live together with another block's."""
    recomputed_block, _ = node.meta.get(RECOMPUTED) or (None, None)
    return node.meta.get(BLOCK), recomputed_block


def _with_operands(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and all nodes that they depend on."""
    operands = set(nodes)
    stack = list(operands)
    while stack:
        for operand in stack.pop().all_input_nodes:
            if operand not in operands:
                operands.add(operand)
                stack.append(operand)
    return operands


def _wait_and_items(wait: fx.Node) -> list[fx.Node]:
    """The wait for a collective, and the calls of `getitem` on its result."""
    results = [wait]
    for node in results:
        results += [user for user in node.users if user.target is getitem]
    return results


def _positions(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: position for position, node in enumerate(graph.nodes)}
