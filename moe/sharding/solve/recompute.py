"""Blocks computed again: of each block the backward pass has what went in and what comes out, and computes the rest
anew when it gets there, for a third more arithmetic (T. Chen et al., arXiv 1604.06174). Likewise what the user's own
`torch.utils.checkpoint` calls, in every plan."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping

from torch import fx

from moe.sharding.capture.capture import Captured
from moe.sharding.capture.simplify import FREE
from moe.sharding.hints.hints import Pin
from moe.sharding.lines import BLOCK, REGION
from moe.sharding.operands import AGAIN, is_operator, source
from moe.sharding.rules.manual import TARGETS


def recompute_checkpointed(captured: Captured) -> None:
    """Have a captured graph compute again what the user's calls of `torch.utils.checkpoint` are to."""
    if any(node.meta.get(REGION) for node in captured.graph.graph.nodes):
        _recompute(captured, lambda node: _maker(node).meta.get(REGION))


def recompute_blocks(captured: Captured) -> bool:
    """Have a captured graph compute its blocks again; whether there are any."""
    return _recompute(captured, lambda node: _maker(node).meta.get(BLOCK))


def _recompute(captured: Captured, part_of: Callable[[fx.Node], str | None]) -> bool:
    """Have a captured graph compute its parts again; whether there are any."""
    backward = captured.backward
    _put_off(captured.graph.graph, backward)
    place = {node: at for at, node in enumerate(captured.graph.graph.nodes)}
    # what comes later and depends on no tangent is of gradients too: those of auxiliary losses
    first = min((place[node] for node in backward if node.op == "call_function"), default=0)
    blocks: dict[str, list[fx.Node]] = defaultdict(list)
    for node in captured.graph.graph.nodes:
        if node.op == "call_function" and place[node] < first and (block := part_of(node)):
            blocks[block].append(node)
    delivered = {
        each for each in (*captured.outputs, *captured.updates.values()) if isinstance(each, fx.Node)
    }
    found = [
        _compute_again(block, nodes, backward, delivered, place) for block, nodes in sorted(blocks.items())
    ]
    captured.graph.graph.lint()
    return any(found)


def with_again(captured: Captured, pins: Mapping[str, Pin]) -> dict[str, Pin]:
    """What is computed again lies as it did the first time."""
    again = (node for node in captured.graph.graph.nodes if AGAIN in node.meta)
    return {**pins, **{node.name: pins[first] for node in again if (first := node.meta[AGAIN][1]) in pins}}


def _maker(node: fx.Node) -> fx.Node:
    return node if is_operator(node) else source(node)[0]


def _put_off(graph: fx.Graph, backward: Collection[fx.Node]) -> None:
    """Views that only the backward pass uses stand before their first use: in the forward pass they would have what
    they are of computed again too soon."""
    place = {node: (at, 0) for at, node in enumerate(graph.nodes)}
    for node in reversed(list(graph.nodes)):
        if node in backward and node.op == "call_function" and node.users:
            first = min(node.users, key=place.__getitem__)
            if not any(each in backward for each in node.all_input_nodes) or node.target in FREE:
                at, before = place[first]
                place[node] = at, before - 1
                first.prepend(node)


def _compute_again(
    block: str,
    nodes: list[fx.Node],
    backward: Collection[fx.Node],
    delivered: Collection[fx.Node],
    place: dict[fx.Node, int],
) -> bool:
    inside = set(nodes)
    stays = {
        node
        for node in nodes
        if node in delivered
        or node.target in TARGETS
        or any(user not in inside and user not in backward for user in node.users)
    }
    needed = [node for node in nodes if node not in stays and any(user in backward for user in node.users)]
    every = _made_of(needed, inside - stays)
    if not every:
        return False
    first = min(
        (user for node in needed for user in node.users if user in backward), key=lambda user: place[user]
    )
    new: dict[fx.Node, fx.Node] = {}
    graph = first.graph
    with graph.inserting_before(first):
        for node in nodes:
            if node in every:
                new[node] = graph.node_copy(node, lambda each: new.get(each, each))
                new[node].meta[AGAIN] = block, node.name
    for node, again in new.items():
        node.replace_all_uses_with(again, delete_user_cb=lambda user: user in backward)
    return True


def _made_of(needed: Iterable[fx.Node], among: Collection[fx.Node]) -> set[fx.Node]:
    """What the needed nodes are made of."""
    found: set[fx.Node] = set()
    waiting = list(needed)
    while waiting:
        node = waiting.pop()
        if node in among and node not in found:
            found.add(node)
            waiting += node.all_input_nodes
            if not is_operator(node):
                continue
            # of several results all are named
            waiting += [user for user in node.users if not is_operator(user) and user.op == "call_function"]
    return found
