"""Recomputation: only the inputs and outputs of a block are saved for the backward pass, which computes the rest of the
block again just before the block's gradients, for a third more arithmetic (T. Chen et al., arXiv 1604.06174). Calls of
`torch.utils.checkpoint` in the user's code are recomputed in every plan."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping

from torch import fx

from moe.sharding.capture.capture import CapturedGraph
from moe.sharding.capture.simplify import FREE
from moe.sharding.hints.hints import Pin
from moe.sharding.lines import BLOCK, REGION
from moe.sharding.operands import RECOMPUTED, is_operator, source
from moe.sharding.rules.manual import TARGETS


def recompute_checkpointed(capture: CapturedGraph) -> None:
    """Recompute the user's calls of `torch.utils.checkpoint`, in place."""
    if any(node.meta.get(REGION) for node in capture.graph.graph.nodes):
        _recompute(capture, lambda node: _maker(node).meta.get(REGION))


def recompute_blocks(capture: CapturedGraph) -> bool:
    """Recompute the blocks of a captured graph, in place. Returns whether any operator is recomputed."""
    return _recompute(capture, lambda node: _maker(node).meta.get(BLOCK))


def _recompute(capture: CapturedGraph, part_of: Callable[[fx.Node], str | None]) -> bool:
    """Recompute the parts that `part_of` names. Returns whether any operator is recomputed."""
    backward = capture.backward
    _delay_views(capture.graph.graph, backward)
    position = {node: number for number, node in enumerate(capture.graph.graph.nodes)}
    # operators after the first one of the backward pass belong to gradients of auxiliary losses, even without a tangent
    first = min((position[node] for node in backward if node.op == "call_function"), default=0)
    blocks: dict[str, list[fx.Node]] = defaultdict(list)
    for node in capture.graph.graph.nodes:
        if node.op == "call_function" and position[node] < first and (block := part_of(node)):
            blocks[block].append(node)
    results = {result for result in (*capture.outputs, *capture.updates.values()) if isinstance(result, fx.Node)}
    has_copies = [
        _recompute_block(block, nodes, backward, results, position) for block, nodes in sorted(blocks.items())
    ]
    capture.graph.graph.lint()
    return any(has_copies)


def with_recomputed_pins(capture: CapturedGraph, pins: Mapping[str, Pin]) -> dict[str, Pin]:
    """The pins, and the same pins for recomputed operators."""
    copies = {node.name: node.meta[RECOMPUTED][1] for node in capture.graph.graph.nodes if RECOMPUTED in node.meta}
    return {**pins, **{copy: pins[original] for copy, original in copies.items() if original in pins}}


def _maker(node: fx.Node) -> fx.Node:
    return node if is_operator(node) else source(node)[0]


def _delay_views(graph: fx.Graph, backward: Collection[fx.Node]) -> None:
    """Move views that only the backward pass uses to just before their first use: a block is recomputed before the
    backward pass first uses it, and a view among the operators of the forward pass would be that use."""
    position = {node: (number, 0) for number, node in enumerate(graph.nodes)}
    for node in reversed(list(graph.nodes)):
        if node in backward and node.op == "call_function" and node.users:
            first = min(node.users, key=position.__getitem__)
            if not any(operand in backward for operand in node.all_input_nodes) or node.target in FREE:
                number, distance = position[first]
                position[node] = number, distance - 1
                first.prepend(node)


def _recompute_block(
    block: str,
    nodes: list[fx.Node],
    backward: Collection[fx.Node],
    results: Collection[fx.Node],
    position: Mapping[fx.Node, int],
) -> bool:
    """Copy the operators of a block that the backward pass needs to before its first use of them. Outputs of the block
    are saved. Returns whether there is such an operator."""
    block_nodes = set(nodes)
    outputs = {
        node
        for node in nodes
        if node in results
        or node.target in TARGETS
        or any(user not in block_nodes and user not in backward for user in node.users)
    }
    activations = [node for node in nodes if node not in outputs and any(user in backward for user in node.users)]
    originals = _with_operands(activations, block_nodes - outputs)
    if not originals:
        return False
    users = (user for node in activations for user in node.users if user in backward)
    first = min(users, key=position.__getitem__)
    copies: dict[fx.Node, fx.Node] = {}
    graph = first.graph
    with graph.inserting_before(first):
        for node in nodes:
            if node in originals:
                copies[node] = graph.node_copy(node, lambda operand: copies.get(operand, operand))
                copies[node].meta[RECOMPUTED] = block, node.name
    for node, copy in copies.items():
        node.replace_all_uses_with(copy, delete_user_cb=lambda user: user in backward)
    return True


def _with_operands(nodes: Iterable[fx.Node], candidates: Collection[fx.Node]) -> set[fx.Node]:
    """Candidates among the nodes, and candidates that these depend on through other candidates. All results of an
    operator with several results are included."""
    operands: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in candidates and node not in operands:
            operands.add(node)
            stack += node.all_input_nodes
            if is_operator(node):
                stack += [user for user in node.users if not is_operator(user) and user.op == "call_function"]
    return operands
