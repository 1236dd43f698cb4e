"""Full tensors of a model, gathered from the parts of ranks."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moe.parallel import Layout, LocalParameter, ParameterShard


def local_indices(part: ParameterShard, layout: Layout) -> Tensor:
    """Indices of this rank's part in the full tensor, in the part's shape: split as by `torch.chunk`, axis by axis."""
    indices = torch.arange(part.shape.numel()).view(part.shape)
    for axis, dim in part.splits:
        chunks, empty = indices.chunk(layout.degree(axis), dim), indices.narrow(dim, 0, 0)
        indices = chunks[layout.index(axis)] if layout.index(axis) < len(chunks) else empty
    return indices


class FullTensors:
    """Full tensors, gathered from the parts of ranks, which may have different parameters.

    With `on_rank0`, all are gathered to rank 0 alone, and the other ranks get none.
    """

    def __init__(self, parameters: list[LocalParameter], layout: Layout, *, on_rank0: bool = False) -> None:
        self._parameters, self._layout, self._on_rank0 = parameters, layout, on_rank0
        own_parts = [
            (parameter.name, parameter.part.shape, local_indices(parameter.part, layout).reshape(-1).numpy())
            for parameter in parameters
        ]
        parts_by_rank: list[Any] = [own_parts]
        """(name, full shape, indices of the rank's elements) of each rank's parameters: arrays of NumPy, which are
        pickled several times faster than tensors."""
        if layout.world_group is not None:
            parts_by_rank = [None] * layout.world_size
            dist.all_gather_object(parts_by_rank, own_parts)
        self._shapes: dict[str, torch.Size] = {name: shape for parts in parts_by_rank for name, shape, _ in parts}
        self._is_in_all_ranks = all(parts_by_rank)
        self._positions = self._positions_by_rank(parts_by_rank)
        self._is_repeated = self._repeated_by_rank()
        self._max_length = max(len(positions) for positions in self._positions)

    def gradients(self) -> dict[str, Tensor]:
        """Every gradient in full."""
        return self.gather([parameter.local.grad.cpu() for parameter in self._parameters])  # type: ignore[union-attr]

    def gather(self, local_parts: list[Tensor]) -> dict[str, Tensor]:
        """Full tensors by name, from this rank's part of each. A part that several ranks have must be the same."""
        rank_values = self._values_by_rank(self._end_to_end(local_parts))
        if not rank_values:
            return {}
        elements = rank_values[0].new_empty(sum(shape.numel() for shape in self._shapes.values()))
        for positions, is_repeated, padded_values in zip(self._positions, self._is_repeated, rank_values, strict=True):
            values = padded_values[: len(positions)]
            if is_repeated.any():
                earlier_values = torch.where(is_repeated, elements[positions], values)
                if not torch.equal(earlier_values, values):
                    torch.testing.assert_close(earlier_values, values, rtol=1e-12, atol=1e-14)
            elements[positions] = values
        parts = elements.split([shape.numel() for shape in self._shapes.values()])
        tensors = {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}
        if elements.isnan().any():
            raise AssertionError(f"NaN in {[name for name, tensor in tensors.items() if tensor.isnan().any()]}")
        return tensors

    def _positions_by_rank(self, parts_by_rank: list[Any]) -> list[Tensor]:
        """Positions of each rank's elements in all full tensors, end to end."""
        starts, end = {}, 0
        for name, shape in self._shapes.items():
            starts[name], end = end, end + shape.numel()
        no_positions = np.empty(0, dtype=np.int64)
        return [
            torch.from_numpy(np.concatenate([no_positions, *(starts[name] + indices for name, _, indices in parts)]))
            for parts in parts_by_rank
        ]

    def _repeated_by_rank(self) -> list[Tensor]:
        """Whether an earlier rank has each of a rank's elements, too."""
        is_in_a_rank = torch.zeros(sum(shape.numel() for shape in self._shapes.values()), dtype=torch.bool)
        repeated = []
        for positions in self._positions:
            repeated.append(is_in_a_rank[positions])
            is_in_a_rank[positions] = True
        assert is_in_a_rank.all(), "no rank has some elements"
        return repeated

    def _values_by_rank(self, local_values: Tensor) -> list[Tensor]:
        """Values of all ranks, padded to the same length; none on ranks that do not get them."""
        if self._layout.world_group is None:
            return [local_values]
        own_values = functional.pad(local_values, (0, self._max_length - local_values.numel()))
        rank_values = [torch.empty_like(own_values) for _ in range(self._layout.world_size)]
        if not self._on_rank0:
            dist.all_gather(rank_values, own_values)
        elif self._layout.rank == 0:
            dist.gather(own_values, rank_values)
        else:
            dist.gather(own_values)
            rank_values = []
        return rank_values

    def _end_to_end(self, local_parts: list[Tensor]) -> Tensor:
        """Elements of all parts, in the dtype of other ranks if this one has none."""
        values = torch.cat([part.reshape(-1) for part in local_parts]) if local_parts else torch.empty(0)
        if self._is_in_all_ranks:
            return values
        dtypes: list[Any] = [None] * self._layout.world_size
        dist.all_gather_object(dtypes, values.dtype if local_parts else None)
        return values.to(next(dtype for dtype in dtypes if dtype is not None))
