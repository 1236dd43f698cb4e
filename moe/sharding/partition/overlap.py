"""Overlap of all-to-alls with computation: each begins as soon as its operand is computed, calls it does not depend on
are moved behind that, and it is waited for at the first use of its result."""

from torch import fx

from moe.sharding.exchange import exchange


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
