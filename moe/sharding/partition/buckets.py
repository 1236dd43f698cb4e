"""Buckets of exchanges: what may go out at the same time along the same axis goes out as one collective, so that the
latency of links is paid once. Gradients are added up in this way while the backward pass goes on.

A bucket goes out when the last of it is there; it is closed as soon as it is full, and when what comes next would keep
waiting somebody who needs what is in it. Views and scalar arithmetic are delayed until their first use. Operators on
exchanged tensors that only the output needs are delayed to the end, unless their result is smaller than an operand:
delaying the gradient of a weight would keep its operands alive.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx

from moe.sharding.capture.simplify import FREE
from moe.sharding.exchange import exchange, joint
from moe.sharding.exchange.moves import BUCKET_BYTES
from moe.sharding.lines import BLOCK
from moe.sharding.partition import runtime
from moe.sharding.partition.overlap import begin_all_to_alls, finish_in_turn
from moe.sharding.partition.program import Program
from moe.sharding.partition.writer import moved_bytes

aten = torch.ops.aten


@dataclass(frozen=True)
class _Kind:
    """Of an exchange as a program calls it."""

    begins: Any
    """What begins several at once."""
    is_begun: bool
    """Whether the call only begins it."""
    early: bool
    """Whether it may go out as soon as its part is there; a gather may not, as what it gives takes more room."""


_VIEWS = (aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)

_KINDS: dict[Any, _Kind] = {
    exchange.all_reduce: _Kind(joint.begin_all_reduces, False, True),
    exchange.begin_all_reduce: _Kind(joint.begin_all_reduces, True, True),
    exchange.reduce_scatter: _Kind(joint.begin_reduce_scatters, False, True),
    exchange.begin_reduce_scatter: _Kind(joint.begin_reduce_scatters, True, True),
    exchange.gather: _Kind(joint.begin_gathers, False, False),
    exchange.begin_gather: _Kind(joint.begin_gathers, True, False),
}


@dataclass(frozen=True, eq=False)
class _Exchange:
    """One exchange of a program."""

    call: fx.Node
    result: fx.Node
    """What the program goes on with: the call, or what waits for it."""
    begins: Any
    ready: int
    """Place in the program at which it may go out."""
    needed: int
    """Place of the first that needs what comes of it."""
    num_bytes: int

    @property
    def key(self) -> tuple[Any, ...]:
        """What exchanges of one bucket have in common."""
        _, _, axis, *others = self.call.args
        return (self.begins, axis, *(others if self.begins is joint.begin_all_reduces else ()))


@dataclass(eq=False)
class _Bucket:
    members: list[_Exchange] = field(default_factory=list)

    @property
    def ready(self) -> int:
        return max(each.ready for each in self.members)

    @property
    def needed(self) -> int:
        return min(each.needed for each in self.members)

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.members)


def bucketed(program: Program, degrees: Sequence[int]) -> Program:
    """The same program with its exchanges in buckets; its graphs are changed. `degrees` are those of its mesh."""
    for each in (program.forward, program.backward):
        if each is not None:
            put_in_buckets(each, degrees)
    return program


def put_in_buckets(module: fx.GraphModule, degrees: Sequence[int]) -> None:
    """The same of one graph."""
    graph = module.graph
    _put_off(graph)
    nodes = list(graph.nodes)
    place = {node: at for at, node in enumerate(nodes)}
    buckets = [bucket for bucket in _buckets(_exchanges(nodes, place, degrees)) if len(bucket.members) > 1]
    for bucket in buckets:
        _write(graph, bucket, nodes)
    for bucket in buckets:  # the old ones, which were there to say where new ones go
        for each in bucket.members:
            for node in dict.fromkeys((each.result, each.call)):
                graph.erase_node(node)
    begin_all_to_alls(graph)
    finish_in_turn(graph)
    module.recompile()


def _put_off(graph: fx.Graph) -> None:
    """Move what costs nothing behind all that its users do not wait for."""
    at: dict[fx.Node, tuple[int, int, int]] = {}
    waiting, final = _waiting(graph), set[fx.Node]()
    for place, node in reversed(list(enumerate(graph.nodes))):
        at[node] = (place, 0, place)
        if node in waiting and all(user in final or user.op == "output" for user in node.users):
            final.add(node)
        if node.users and (node in final or _costs_nothing(node)):
            later, before, _ = min(at[user] for user in node.users)
            at[node] = (later, before - 1, place)
    *others, output = sorted(graph.nodes, key=lambda node: at[node])
    for node in others:
        output.prepend(node)


def _waiting(graph: fx.Graph) -> set[fx.Node]:
    """Operators of torch's on exchanged tensors, and those that follow from these, except those whose result is smaller
    than an operand."""
    waiting: set[fx.Node] = set()
    for node in graph.nodes:
        if getattr(node.target, "namespace", "") != "aten" or _is_smaller_than_operand(node):
            continue
        if any(operand in waiting or _is_exchanged(operand) for operand in node.all_input_nodes):
            waiting.add(node)
    return waiting


def _is_exchanged(node: fx.Node) -> bool:
    return node.target is exchange.finish or ("move" in node.meta and node.target in _KINDS)


def _is_smaller_than_operand(node: fx.Node) -> bool:
    """Whether the result is smaller than an operand; True where a size is unknown, as of the program's arguments."""
    size, operand_sizes = _size(node), [_size(operand) for operand in node.all_input_nodes]
    return size is None or any(operand is None or operand > size for operand in operand_sizes)


def _size(node: fx.Node) -> int | None:
    """Elements of the whole tensor that a node is a part of, where its shape is known."""
    if node.target in (runtime.first, runtime.valid):
        return 1
    shape = node.meta.get("whole")
    return None if shape is None else math.prod(shape)


def _costs_nothing(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target in FREE or node.target in _VIEWS:
        return True
    is_ours = getattr(node.target, "namespace", "aten") != "aten"
    return not is_ours and torch.Tag.pointwise in getattr(node.target, "tags", ()) and _is_number(node)


def _is_number(node: fx.Node) -> bool:
    return math.prod(node.meta.get("whole", (0,))) == 1


def _exchanges(
    nodes: Sequence[fx.Node], place: Mapping[fx.Node, int], degrees: Sequence[int]
) -> Iterator[_Exchange]:
    """In the order in which they may go out."""
    found: list[_Exchange] = []
    results: set[fx.Node] = set()
    for node in nodes:
        if node.op != "call_function" or (kind := _KINDS.get(node.target)) is None or "move" not in node.meta:
            continue
        result = node
        if kind.is_begun:
            finishes = [user for user in node.users if user.target is exchange.finish]
            if len(finishes) != 1 or len(node.users) != 1:
                continue
            (result,) = finishes
        part = node.args[1]
        assert isinstance(part, fx.Node)
        # What comes of another bucket is there when somebody asks for it, and no sooner.
        ready = place[part] if kind.early and part not in results else place[node]
        if not result.users:
            continue
        needed = min(place[user] for user in result.users)
        results.add(result)
        found.append(_Exchange(node, result, kind.begins, ready, needed, moved_bytes(node, degrees)))
    return iter(sorted(found, key=lambda each: (each.ready, place[each.call])))


def _buckets(exchanges: Iterator[_Exchange]) -> Iterator[_Bucket]:
    open_now: dict[tuple[Any, ...], _Bucket] = {}
    for each in exchanges:
        bucket = open_now.get(each.key)
        if bucket is not None and (
            each.ready >= bucket.needed or bucket.num_bytes >= BUCKET_BYTES or each.num_bytes >= BUCKET_BYTES
        ):
            yield open_now.pop(each.key)
            bucket = None
        if bucket is None:
            bucket = open_now[each.key] = _Bucket()
        bucket.members.append(each)
    yield from open_now.values()


def _write(graph: fx.Graph, bucket: _Bucket, nodes: Sequence[fx.Node]) -> None:
    first = bucket.members[0].call
    mesh, _, axis, *others = first.args
    parts = [each.call.args[1] for each in bucket.members]
    if bucket.members[0].begins is joint.begin_all_reduces:
        arguments: tuple[Any, ...] = tuple(others)
    else:  # dims and sizes of each
        arguments = tuple(map(list, zip(*(each.call.args[3:] for each in bucket.members), strict=True)))
    with graph.inserting_after(nodes[bucket.ready]):
        begun = graph.call_function(bucket.members[0].begins, (mesh, parts, axis, *arguments))
    begun.meta.update({what: first.meta.get(what) for what in ("where", "block", BLOCK)})
    with graph.inserting_before(nodes[bucket.needed]):
        every = graph.call_function(joint.finish, (begun,))
        results = [graph.call_function(getitem, (every, number)) for number in range(len(parts))]
    for each, result in zip(bucket.members, results, strict=True):
        each.result.replace_all_uses_with(result)
