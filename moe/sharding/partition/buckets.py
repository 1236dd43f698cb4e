"""Buckets of exchanges. Exchanges of one kind along one axis that may start at the same time become one collective, so
that latency is paid once. Gradients are reduced in this way during the backward pass.

A bucket starts when the operands of all its exchanges are computed. It is closed when it is full, or when the operand
of the next exchange is computed after the first use of a result of the bucket. Views and scalar arithmetic are delayed
until their first use. Operators on exchanged tensors that only the output needs are delayed to the end, unless their
result is smaller than an operand: delaying the gradient of a weight would keep its operands alive.
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
from moe.sharding.operands import RECOMPUTED
from moe.sharding.partition import runtime
from moe.sharding.partition.overlap import begin_all_to_alls, finish_in_turn
from moe.sharding.partition.program import Program
from moe.sharding.partition.writer import moved_bytes

aten = torch.ops.aten


@dataclass(frozen=True)
class _ExchangeKind:
    """Properties of the function that a program calls for an exchange."""

    joint_start: Any
    """Function that starts several exchanges as one collective."""
    is_start: bool
    """Whether the call only starts the exchange, and another one waits for it."""
    is_early: bool
    """Whether it may start as soon as its operand is computed. A gather may not: its result is larger than its
    operand."""


_VIEWS = (aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)

_KINDS: dict[Any, _ExchangeKind] = {
    exchange.all_reduce: _ExchangeKind(joint.begin_all_reduces, False, True),
    exchange.begin_all_reduce: _ExchangeKind(joint.begin_all_reduces, True, True),
    exchange.reduce_scatter: _ExchangeKind(joint.begin_reduce_scatters, False, True),
    exchange.begin_reduce_scatter: _ExchangeKind(joint.begin_reduce_scatters, True, True),
    exchange.gather: _ExchangeKind(joint.begin_gathers, False, False),
    exchange.begin_gather: _ExchangeKind(joint.begin_gathers, True, False),
}


@dataclass(frozen=True, eq=False)
class _ProgramExchange:
    """One exchange of a program."""

    call: fx.Node
    result: fx.Node
    """The call itself, or the call that waits for it."""
    joint_start: Any
    earliest_start: int
    """Position in the program of the call after which the exchange may start."""
    first_use: int
    """Position in the program of the first call that takes the result."""
    num_bytes: int

    @property
    def key(self) -> tuple[Any, ...]:
        """Key that is equal for exchanges that may share a bucket."""
        _, _, axis, *options = self.call.args
        return (self.joint_start, axis, *(options if self.joint_start is joint.begin_all_reduces else ()))


@dataclass(eq=False)
class _ExchangeBucket:
    members: list[_ProgramExchange] = field(default_factory=list)

    @property
    def earliest_start(self) -> int:
        return max(member.earliest_start for member in self.members)

    @property
    def first_use(self) -> int:
        return min(member.first_use for member in self.members)

    @property
    def num_bytes(self) -> int:
        return sum(member.num_bytes for member in self.members)


def with_buckets(program: Program, degrees: Sequence[int]) -> Program:
    """The program with its exchanges in buckets; its graphs are changed. `degrees` are those of its mesh."""
    for module in (program.forward, program.backward):
        if module is not None:
            put_in_buckets(module, degrees)
    return program


def put_in_buckets(module: fx.GraphModule, degrees: Sequence[int]) -> None:
    """Put the exchanges of a graph in buckets, in place. `degrees` are those of its mesh."""
    graph = module.graph
    _delay_to_use(graph)
    nodes = list(graph.nodes)
    position = {node: number for number, node in enumerate(nodes)}
    buckets = [bucket for bucket in _buckets(_exchanges(nodes, position, degrees)) if len(bucket.members) > 1]
    for bucket in buckets:
        _write(graph, bucket, nodes)
    for bucket in buckets:  # only now: positions of other buckets may be those of these calls
        for member in bucket.members:
            for node in dict.fromkeys((member.result, member.call)):
                graph.erase_node(node)
    begin_all_to_alls(graph)
    finish_in_turn(graph)
    module.recompile()


def _delay_to_use(graph: fx.Graph) -> None:
    """Move calls that cost nothing, and operators on exchanged tensors that only the output needs, to just before their
    first use."""
    order: dict[fx.Node, tuple[int, int, int]] = {}
    """Sort key: position of the call, or of the first use; negative distance from that use; position before."""
    delayable, final = _delayable(graph), set[fx.Node]()
    for position, node in reversed(list(enumerate(graph.nodes))):
        order[node] = (position, 0, position)
        if node in delayable and all(user in final or user.op == "output" for user in node.users):
            final.add(node)
        if node.users and (node in final or _costs_nothing(node)):
            first_use, distance, _ = min(order[user] for user in node.users)
            order[node] = (first_use, distance - 1, position)
    *calls, output = sorted(graph.nodes, key=lambda node: order[node])
    for node in calls:
        output.prepend(node)


def _delayable(graph: fx.Graph) -> set[fx.Node]:
    """Torch's operators on exchanged tensors, and on results of these operators, except those whose result is smaller
    than an operand."""
    delayable: set[fx.Node] = set()
    for node in graph.nodes:
        if getattr(node.target, "namespace", "") != "aten" or _is_smaller_than_operand(node):
            continue
        if any(operand in delayable or _is_exchanged(operand) for operand in node.all_input_nodes):
            delayable.add(node)
    return delayable


def _is_exchanged(node: fx.Node) -> bool:
    return node.target is exchange.finish or ("move" in node.meta and node.target in _KINDS)


def _is_smaller_than_operand(node: fx.Node) -> bool:
    """Whether the result is smaller than an operand; True where a size is unknown, as of the program's arguments."""
    size, operand_sizes = _size(node), [_size(operand) for operand in node.all_input_nodes]
    return size is None or any(operand is None or operand > size for operand in operand_sizes)


def _size(node: fx.Node) -> int | None:
    """Number of elements of the whole tensor that a node is a part of; None if it is unknown."""
    if node.target in (runtime.first, runtime.valid):
        return 1
    shape = node.meta.get("whole")
    return None if shape is None else math.prod(shape)


def _costs_nothing(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target in FREE or node.target in _VIEWS:
        return True
    is_custom = getattr(node.target, "namespace", "aten") != "aten"
    return not is_custom and torch.Tag.pointwise in getattr(node.target, "tags", ()) and _is_scalar(node)


def _is_scalar(node: fx.Node) -> bool:
    return math.prod(node.meta.get("whole", (0,))) == 1


def _exchanges(
    nodes: Sequence[fx.Node], position: Mapping[fx.Node, int], degrees: Sequence[int]
) -> Iterator[_ProgramExchange]:
    """Exchanges in the order in which they may start."""
    exchanges: list[_ProgramExchange] = []
    results: set[fx.Node] = set()
    for node in nodes:
        if node.op != "call_function" or (kind := _KINDS.get(node.target)) is None or "move" not in node.meta:
            continue
        result = node
        if kind.is_start:
            waits = [user for user in node.users if user.target is exchange.finish]
            if len(waits) != 1 or len(node.users) != 1:
                continue
            (result,) = waits
        operand = node.args[1]
        assert isinstance(operand, fx.Node)
        # a bucket's wait is moved to the first use of a result, so an exchange of that result cannot start earlier
        is_early = kind.is_early and operand not in results
        earliest_start = position[operand if is_early else node]
        if not result.users:
            continue
        first_use = min(position[user] for user in result.users)
        results.add(result)
        num_bytes = moved_bytes(node, degrees)
        exchanges.append(_ProgramExchange(node, result, kind.joint_start, earliest_start, first_use, num_bytes))
    return iter(sorted(exchanges, key=lambda member: (member.earliest_start, position[member.call])))


def _buckets(exchanges: Iterator[_ProgramExchange]) -> Iterator[_ExchangeBucket]:
    open_buckets: dict[tuple[Any, ...], _ExchangeBucket] = {}
    for member in exchanges:
        bucket = open_buckets.get(member.key)
        if bucket is not None and (
            member.earliest_start >= bucket.first_use
            or bucket.num_bytes >= BUCKET_BYTES
            or member.num_bytes >= BUCKET_BYTES
        ):
            yield open_buckets.pop(member.key)
            bucket = None
        if bucket is None:
            bucket = open_buckets[member.key] = _ExchangeBucket()
        bucket.members.append(member)
    yield from open_buckets.values()


def _write(graph: fx.Graph, bucket: _ExchangeBucket, nodes: Sequence[fx.Node]) -> None:
    first = bucket.members[0].call
    mesh, _, axis, *options = first.args
    operands = [member.call.args[1] for member in bucket.members]
    if bucket.members[0].joint_start is joint.begin_all_reduces:
        arguments: tuple[Any, ...] = tuple(options)
    else:  # lists of the members' dims and sizes
        arguments = tuple(map(list, zip(*(member.call.args[3:] for member in bucket.members), strict=True)))
    with graph.inserting_after(nodes[bucket.earliest_start]):
        start = graph.call_function(bucket.members[0].joint_start, (mesh, operands, axis, *arguments))
    start.meta.update({key: first.meta.get(key) for key in ("line", "block", BLOCK, RECOMPUTED)})
    with graph.inserting_before(nodes[bucket.first_use]):
        wait = graph.call_function(joint.finish, (start,))
        results = [graph.call_function(getitem, (wait, number)) for number in range(len(operands))]
    for member, result in zip(bucket.members, results, strict=True):
        member.result.replace_all_uses_with(result)
