"""Overlap of exchanges with computation. An all-to-all begins as soon as its operand is computed, calls it does not
depend on are moved behind that, and it is waited for at the first use of its result. Of reductions few are under way at
a time: each holds what it was given until it is waited for."""

from operator import getitem

from torch import fx

from moe.sharding.exchange import exchange, joint

UNDER_WAY = 2
"""Reductions that are under way at a time."""

_REDUCTIONS = (
    exchange.begin_all_reduce,
    exchange.begin_reduce_scatter,
    joint.begin_all_reduces,
    joint.begin_reduce_scatters,
)


def finish_in_turn(graph: fx.Graph) -> None:
    """Keep at most two reductions in flight, in place: wait for the oldest before a third begins, which frees its
    input."""
    place = {node: at for at, node in enumerate(graph.nodes)}
    under_way: list[fx.Node] = []
    for begun in [node for node in graph.nodes if node.target in _REDUCTIONS and len(node.users) == 1]:
        if len(under_way) == UNDER_WAY:
            (finish,) = under_way.pop(0).users
            if place[finish] > place[begun]:
                taken = [user for user in finish.users if user.target is getitem]
                for node in (finish, *taken):
                    begun.prepend(node)
        under_way.append(begun)
    graph.lint()


def begin_all_to_alls(graph: fx.Graph) -> None:
    """Split each all-to-all of a program, in place, into its begin and a later wait. The order of collectives is the
    same on all ranks."""
    exchanges = [
        node
        for node in graph.nodes
        if node.op == "call_function" and node.target is exchange.all_to_all and node.users
    ]
    for node in exchanges:
        with graph.inserting_before(node):
            begun = graph.call_function(exchange.begin_all_to_all, node.args, node.kwargs)
        begun.meta.update(node.meta)
        node.target, node.args, node.kwargs = exchange.finish, (begun,), {}
        node.meta.pop("move", None)
        _put_behind(graph, begun)
    place = {node: at for at, node in enumerate(graph.nodes)}
    for node in exchanges:
        min(node.users, key=lambda user: place[user]).prepend(node)
    graph.lint()


def _put_behind(graph: fx.Graph, begun: fx.Node) -> None:
    """Move the calls that a collective does not depend on behind it, in their order."""
    needed, waiting = {begun}, [begun]
    while waiting:
        for operand in waiting.pop().all_input_nodes:
            if operand not in needed:
                needed.add(operand)
                waiting.append(operand)
    before: list[fx.Node] = []
    for node in graph.nodes:
        if node is begun:
            break
        before.append(node)
    # the list of arguments is emptied once; results of earlier exchanges stay where they are waited for
    last_argument = max((at for at, node in enumerate(before) if node.op == "call_method"), default=0)
    behind = begun
    for node in before[last_argument + 1 :]:
        if node not in needed and node.op == "call_function":
            behind.append(node)
            behind = node
