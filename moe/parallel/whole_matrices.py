"""Whole matrices of sharded parameters, for updates that need all rows and columns at once.

Each matrix has an owner: one of the ranks with a part of it, chosen so that all ranks have about equal work. The owner
collects the other parts, and returns the results to every rank with a part, replicas included. A parameter of experts,
or another stack, is one matrix per index of its leading dimensions.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from moe.parallel import json_collectives
from moe.parallel.collective import collective
from moe.parallel.mesh import STAGE_AXES, Layout
from moe.parallel.parameters import LocalParameter, extent

BUCKET_ELEMENTS = 1 << 26
"""Elements per rank that are collected at once."""
Range = Sequence[int]
"""(first, end) along a dimension."""
MatrixFunction = Callable[[Tensor], None]
"""Changes each matrix of `[N, rows, columns]` in place."""


@dataclass(frozen=True)
class _Block:
    """A rank's part of a matrix."""

    rank: int
    position: int
    """Position among the matrices of the parameter that the rank has parts of."""
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    def view_in(self, matrix: Tensor) -> Tensor:
        """View of this part of a whole matrix."""
        return matrix[slice(*self.rows), slice(*self.columns)]


@dataclass(frozen=True)
class _Matrix:
    parameter: int
    """Position of its parameter in the bucket."""
    shape: tuple[int, int]
    blocks: tuple[_Block, ...]
    """Parts on all ranks, replicas included."""
    owner: int = 0

    @property
    def cost(self) -> int:
        """Relative cost of the product of the matrix and its transpose."""
        rows, columns = self.shape
        return rows * columns * min(rows, columns)

    @property
    def sources(self) -> Iterable[_Block]:
        """Parts that make up the matrix, each from one rank: from the owner if it has a replica, or else from the first
        rank that has."""
        by_extent: dict[tuple[Range, Range], _Block] = {}
        for block in sorted(self.blocks, key=lambda block: block.rank != self.owner):
            by_extent.setdefault((block.rows, block.columns), block)
        return by_extent.values()


@dataclass(frozen=True)
class _Transfer:
    """A block that one rank sends to another."""

    matrix: int
    """Number of its matrix in the bucket."""
    block: _Block
    sender: int
    receiver: int


class WholeMatrices:
    """Matrices of parameters, which have two dimensions, or three with that of experts. All ranks construct it
    together; those of a pipeline stage have the same parameters in the same order."""

    def __init__(self, parameters: Sequence[LocalParameter], layout: Layout) -> None:
        own_extents: list[Sequence[Range]] = [extent(parameter.part, layout) for parameter in parameters]
        # Ranks of another pipeline stage have other parameters.
        num_ranks = layout.degree(*STAGE_AXES) if layout.world_size > 1 else 1
        first_rank = layout.rank // num_ranks * num_ranks
        extents = [own_extents] if layout.world_group is None else json_collectives.all_gather_json(own_extents)
        extents = extents[first_rank : first_rank + num_ranks]
        loads = [0] * num_ranks
        self._buckets = []
        for first, end in _buckets(parameters, num_ranks):
            matrices = [
                matrix
                for number in range(first, end)
                for matrix in _matrices(number - first, parameters[number].part.shape, [own[number] for own in extents])
            ]
            self._buckets.append(_Bucket(parameters[first:end], _with_owners(matrices, loads), layout))

    def map(
        self, value_of: Callable[[LocalParameter], Tensor], function: MatrixFunction
    ) -> Iterator[tuple[LocalParameter, Tensor]]:
        """Apply `function` to whole matrices, and yield this rank's parts of the results. `value_of` gives its part of
        a parameter's matrices in a new contiguous tensor, which is overwritten. Collective."""
        for bucket in self._buckets:
            values = [value_of(parameter) for parameter in bucket.parameters]
            stacks = [value.view(prod(value.shape[:-2]), *value.shape[-2:]) for value in values]
            bucket.apply(stacks, function)
            yield from zip(bucket.parameters, values, strict=True)


class _Bucket:
    """Parameters whose matrices are exchanged together."""

    def __init__(self, parameters: Sequence[LocalParameter], matrices: list[_Matrix], layout: Layout) -> None:
        self.parameters, self._matrices = parameters, matrices
        self._group = layout.group(*STAGE_AXES)
        self._num_ranks = 1 if self._group is None else self._group.size()
        self._rank = layout.rank % self._num_ranks
        self._owned: dict[tuple[int, int], list[int]] = {}
        """Numbers of this rank's own matrices, by shape."""
        for number, matrix in enumerate(matrices):
            if matrix.owner == self._rank:
                self._owned.setdefault(matrix.shape, []).append(number)
        self._collected = [
            _Transfer(number, block, block.rank, matrix.owner)
            for number, matrix in enumerate(matrices) for block in matrix.sources if block.rank != matrix.owner
        ]  # fmt: skip
        self._returned = [
            _Transfer(number, block, matrix.owner, block.rank)
            for number, matrix in enumerate(matrices) for block in matrix.blocks if block.rank != matrix.owner
        ]  # fmt: skip

    def apply(self, stacks: list[Tensor], function: MatrixFunction) -> None:
        """Apply `function` to the matrices of which `stacks`, by parameter, are this rank's parts."""
        if self._group is None:
            for stack in stacks:
                function(stack)
            return

        def local(number: int, block: _Block) -> Tensor:
            return stacks[self._matrices[number].parameter][block.position]

        batches = {shape: stacks[0].new_empty(len(numbers), *shape) for shape, numbers in self._owned.items()}
        owned = {
            number: matrix
            for shape, numbers in self._owned.items() for number, matrix in zip(numbers, batches[shape], strict=True)
        }  # fmt: skip
        own_blocks = [
            (number, block) for number in owned for block in self._matrices[number].blocks if block.rank == self._rank
        ]
        for number, block in own_blocks:
            block.view_in(owned[number]).copy_(local(number, block))

        def in_matrix(item: _Transfer) -> Tensor:
            return item.block.view_in(owned[item.matrix])

        def in_stack(item: _Transfer) -> Tensor:
            return local(item.matrix, item.block)

        self._exchange(self._collected, in_stack, in_matrix, stacks[0])
        for batch in batches.values():
            function(batch)
        for number, block in own_blocks:
            local(number, block).copy_(block.view_in(owned[number]))
        self._exchange(self._returned, in_matrix, in_stack, stacks[0])

    def _exchange(
        self,
        transfers: list[_Transfer],
        source_of: Callable[[_Transfer], Tensor],
        target_of: Callable[[_Transfer], Tensor],
        like: Tensor,
    ) -> None:
        """Copy blocks from the sender's source to the receiver's target. Buffers are freed on return."""
        sent = sorted((item for item in transfers if item.sender == self._rank), key=lambda item: item.receiver)
        received = sorted((item for item in transfers if item.receiver == self._rank), key=lambda item: item.sender)
        send_sizes, receive_sizes = [0] * self._num_ranks, [0] * self._num_ranks
        for item in sent:
            send_sizes[item.receiver] += prod(item.block.shape)
        for item in received:
            receive_sizes[item.sender] += prod(item.block.shape)
        send_buffer = torch.cat([like.new_empty(0), *(source_of(item).reshape(-1) for item in sent)])
        receive_buffer = like.new_empty(sum(receive_sizes))
        with collective("all-to-all of matrices"):
            dist.all_to_all_single(receive_buffer, send_buffer, receive_sizes, send_sizes, group=self._group)
        parts = receive_buffer.split([prod(item.block.shape) for item in received])
        for item, part in zip(received, parts, strict=True):
            target_of(item).copy_(part.view(item.block.shape))


def _buckets(parameters: Sequence[LocalParameter], num_ranks: int) -> Iterator[tuple[int, int]]:
    """(first, end) of consecutive parameters that are exchanged together; a larger one is alone."""
    first, num_elements = 0, 0
    for number, parameter in enumerate(parameters):
        numel = parameter.part.shape.numel()
        if number > first and num_elements + numel > BUCKET_ELEMENTS * num_ranks:
            yield first, number
            first, num_elements = number, 0
        num_elements += numel
    if parameters:
        yield first, len(parameters)


def _matrices(parameter: int, shape: Sequence[int], extents: Sequence[Sequence[Range]]) -> Iterator[_Matrix]:
    """Matrices of a parameter with the extents of its parts by rank."""
    blocks: dict[tuple[int, ...], list[_Block]] = {}
    for rank, (*leading, rows, columns) in enumerate(extents):
        if rows[0] == rows[1] or columns[0] == columns[1]:
            continue
        for position, index in enumerate(product(*(range(*bounds) for bounds in leading))):
            block = _Block(rank, position, (rows[0], rows[1]), (columns[0], columns[1]))
            blocks.setdefault(index, []).append(block)
    for index in sorted(blocks):
        yield _Matrix(parameter, (shape[-2], shape[-1]), tuple(blocks[index]))


def _with_owners(matrices: list[_Matrix], loads: list[int]) -> list[_Matrix]:
    """Assign each matrix, the most costly first, to the rank with the least load among those with a part of it, and
    add its cost to `loads`, by rank."""
    owners = [0] * len(matrices)
    for number in sorted(range(len(matrices)), key=lambda number: -matrices[number].cost):
        ranks = {block.rank for block in matrices[number].blocks}
        owners[number] = min(ranks, key=lambda rank: (loads[rank], rank))
        loads[owners[number]] += matrices[number].cost
    return [replace(matrix, owner=owner) for matrix, owner in zip(matrices, owners, strict=True)]
