"""Overlap of exchanges with computation. An all-to-all begins as soon as its operand is computed and is waited for at
the first use of its result. Between the two come calls of its block that do not depend on it: those that stood before
it, and the branch that is first combined with its result, such as a shared expert beside routed ones. At most two
reductions and two all-to-alls are in flight at a time: each holds its operand until it is waited for."""

from collections.abc import Iterable
from operator import getitem

from torch import fx

from moe.sharding.exchange import exchange, joint
from moe.sharding.lines import BLOCK
from moe.sharding.operands import AGAIN
from moe.sharding.partition import runtime
from moe.sharding.rules import differentiated

UNDER_WAY = 2
"""Reductions that are in flight at a time, and all-to-alls."""

_REDUCTIONS = (
    exchange.begin_all_reduce,
    exchange.begin_reduce_scatter,
    joint.begin_all_reduces,
    joint.begin_reduce_scatters,
)
_OPERATORS = (differentiated.begin_forward, differentiated.begin_forward_kept)
_LOCAL = (runtime.first, runtime.valid, runtime.once)
"""Calls that take the mesh but do not communicate."""


def finish_in_turn(graph: fx.Graph) -> None:
    """Keep at most two reductions and two all-to-alls in flight, in place: wait for the oldest before a third begins,
    which frees its input."""
    for kind in (_REDUCTIONS, (exchange.begin_all_to_all,)):
        place = _places(graph)
        in_flight: list[fx.Node] = []
        for begun in [node for node in graph.nodes if node.target in kind and len(node.users) == 1]:
            if len(in_flight) == UNDER_WAY:
                (finish,) = in_flight.pop(0).users
                if place[finish] > place[begun]:
                    for node in _with_items(finish):
                        begun.prepend(node)
            in_flight.append(begun)
    graph.lint()


def begin_all_to_alls(graph: fx.Graph) -> None:
    """Split each all-to-all of a program, in place, into its begin and a later wait; operators that begin with an
    all-to-all are two calls already. The order of collectives is the same on all ranks."""
    _split(graph)
    pairs = [
        (node, finish)
        for node in graph.nodes
        if node.target in (exchange.begin_all_to_all, *_OPERATORS)
        for finish in node.users
    ]
    for begun, _ in pairs:
        _put_behind(graph, begun)
    for begun, finish in pairs:
        _wait_at_first_use(graph, finish)
        _bring_branch_ahead(graph, begun, finish)
    graph.lint()


def _split(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=exchange.all_to_all):
        if node.users:
            with graph.inserting_before(node):
                begun = graph.call_function(exchange.begin_all_to_all, node.args, node.kwargs)
            begun.meta.update(node.meta)
            node.target, node.args, node.kwargs = exchange.finish, (begun,), {}
            node.meta.pop("move", None)


def _put_behind(graph: fx.Graph, begun: fx.Node) -> None:
    """Delay calls of the same region until after `begun` where neither it nor a call that must stay needs them. Their
    order is kept."""
    nodes = list(graph.nodes)
    before = nodes[: nodes.index(begun)]
    # the list of arguments is emptied once, in front of all that may move
    first = max((at + 1 for at, node in enumerate(before) if node.op == "call_method"), default=1)
    needed, region = _operands_of([begun]), _region(begun)
    stays = set(before[:first])
    for node in reversed(before[first:]):
        is_movable = node.op == "call_function" and node not in needed and _region(node) == region
        if not is_movable or not stays.isdisjoint(node.users):
            stays.add(node)
    behind = begun
    for node in before[first:]:
        if node not in stays:
            behind.append(node)
            behind = node


def _wait_at_first_use(graph: fx.Graph, finish: fx.Node) -> None:
    place, waited = _places(graph), _with_items(finish)
    users = {user for node in waited for user in node.users}.difference(waited)
    if users:
        first = min(users, key=place.__getitem__)
        for node in waited:
            first.prepend(node)


def _bring_branch_ahead(graph: fx.Graph, begun: fx.Node, finish: fx.Node) -> None:
    """Find the first call that combines the exchange's result with an independent branch, and move the calls of that
    branch that lie in the same region ahead of the wait. New collectives stay behind it, with what depends on them."""
    nodes = list(graph.nodes)
    mesh, region = nodes[0], _region(begun)
    dependent = {finish}
    stays: set[fx.Node] = set()
    branch: dict[fx.Node, None] = {}
    for node in nodes[nodes.index(finish) + 1 :]:
        inputs = node.all_input_nodes
        if not dependent.isdisjoint(inputs):
            if node.op == "call_function" and not branch.keys().isdisjoint(inputs):
                needed = _operands_of(branch.keys() & set(inputs))
                for call in branch:
                    if call in needed:
                        finish.prepend(call)
                return
            dependent.add(node)
        elif (
            node.op == "call_function"
            and stays.isdisjoint(inputs)
            and (mesh not in inputs or node.target in _LOCAL)
            and (node.target is getitem or _region(node) == region)
        ):
            branch[node] = None
        else:
            stays.add(node)


def _region(node: fx.Node) -> tuple[str | None, str | None]:
    """Region that a call may not leave: its block, and the block recomputed with it, if any. A block that was
    recomputed too soon, or whose gradients came too late, would have its activations live beside another's."""
    recomputed, _ = node.meta.get(AGAIN) or (None, None)
    return node.meta.get(BLOCK), recomputed


def _operands_of(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """These nodes and all that they depend on."""
    needed = set(nodes)
    waiting = list(needed)
    while waiting:
        for operand in waiting.pop().all_input_nodes:
            if operand not in needed:
                needed.add(operand)
                waiting.append(operand)
    return needed


def _with_items(finish: fx.Node) -> list[fx.Node]:
    """The wait for a collective, and the calls of `getitem` on its result."""
    waited = [finish]
    for node in waited:
        waited += [user for user in node.users if user.target is getitem]
    return waited


def _places(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: at for at, node in enumerate(graph.nodes)}
