"""All-to-alls beside what does not need them: each begins as soon as what it sends is there, and is waited for where
its result is used first."""

from torch import fx

from moe.sharding.exchange import exchange


def begin_all_to_alls(graph: fx.Graph) -> None:
    """Begin the all-to-alls of a program where their operands are made, in place. They keep their order, which is the
    same on all ranks."""
    place = {node: at for at, node in enumerate(graph.nodes)}
    last: fx.Node | None = None
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not exchange.all_to_all:
            continue
        before = [*node.all_input_nodes, *([last] if last is not None else [])]
        ready = max(before, key=lambda each: place[each])
        with graph.inserting_after(ready):
            begun = graph.call_function(exchange.begin_all_to_all, node.args, node.kwargs)
        begun.meta.update(node.meta)
        place[begun], last = place[ready], begun
        node.target, node.args, node.kwargs = exchange.finish, (begun,), {}
        node.meta.pop("move", None)
        if node.users:
            min(node.users, key=lambda user: place[user]).prepend(node)
    graph.lint()
