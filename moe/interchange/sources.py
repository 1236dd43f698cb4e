"""Sources of parameters to write, read by name in rectangles."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe.interchange.tensor_reader import DTYPES, NAMES
from moe.parallel import Layout, QuantizedWeight, extent, json_collectives, local_parameters, quant_schemes_of, shard_of
from moe.parallel.collective import collective
from moe.spec.form import BLOCK, SCALES
from moe.spec.parameter import Slices

MAX_PENDING_BYTES = 1 << 26
"""Bytes that a rank may send ahead of rank 0's receives."""


class TensorSource(ABC):
    """Parameters and buffers of a model, read in parts."""

    is_collective = False
    """Whether reads are collective, with the result on rank 0 only."""

    @abstractmethod
    def read(self, name: str, region: Slices, dtype: torch.dtype | None = None) -> Tensor:
        """Rectangle of a parameter or buffer, on the CPU and read-only; `dtype` is preferred but not guaranteed."""

    def finish(self) -> None:  # noqa: B027  (most have nothing to wait for)
        """Wait for pending transfers, after the last read."""


class ModelSource(TensorSource):
    """A model in memory, whole or sharded over the ranks of its layout. Quantized weights are dequantized."""

    def __init__(self, model: nn.Module, layout: Layout | None = None) -> None:
        layout = layout or Layout.single()
        self.is_collective = layout.world_size > 1
        self._parts_by_name: dict[str, tuple[Tensor, Slices]] = {
            parameter.name: (parameter.local.detach(), extent(parameter.part, layout))
            for parameter in local_parameters(model)
        }
        for name, buffer in model.named_buffers():
            self._parts_by_name[name] = buffer.detach(), extent(shard_of(buffer), layout)
        self._schemes, self._rank = quant_schemes_of(model), json_collectives.rank()
        self._pending: deque[tuple[dist.Work, Tensor]] = deque()
        parts_by_rank = json_collectives.all_gather_json(
            {name: (region, NAMES[tensor.dtype]) for name, (tensor, region) in self._parts_by_name.items()}
        )
        self._places: list[dict[str, Slices]] = [
            {name: tuple((first, end) for first, end in region) for name, (region, _) in rank_parts.items()}
            for rank_parts in parts_by_rank
        ]
        self._dtypes = {name: DTYPES[dtype] for rank_parts in parts_by_rank for name, (_, dtype) in rank_parts.items()}

    def read(self, name: str, region: Slices, dtype: torch.dtype | None = None) -> Tensor:
        if (scheme := self._schemes.get(name)) is None:
            return self._read_parameter(name, region, dtype)
        of_scales = (False, True) if scheme.has_scales else (False,)
        first, end = region[scheme.dim]
        blocks = first // BLOCK * BLOCK, min(-(-end // BLOCK) * BLOCK, scheme.length)
        matrix = (*region[: scheme.dim], blocks, *region[scheme.dim + 1 :])
        codes, *scales = (
            self._read_parameter(name + SCALES * is_scales, scheme.codes_of(matrix, of_scales=is_scales), None)
            for is_scales in of_scales
        )
        if self.is_collective and self._rank != 0:
            return codes
        quantized_matrix = QuantizedWeight(
            codes, scales[0] if scales else None, replace(scheme, length=blocks[1] - blocks[0])
        )
        return _cut(quantized_matrix.dequantize(torch.float32), matrix, region)

    def _read_parameter(self, name: str, region: Slices, dtype: torch.dtype | None) -> Tensor:
        """Read a parameter as stored, without dequantizing it."""
        if not self.is_collective:
            local, place = self._parts_by_name[name]
            return _cut(local, place, region).cpu()
        stored_dtype = self._dtypes[name]
        narrower = dtype is not None and dtype.itemsize < stored_dtype.itemsize
        return self._gather(name, region, dtype if dtype is not None and narrower else stored_dtype)

    def _gather(self, name: str, region: Slices, dtype: torch.dtype) -> Tensor:
        """Gather the rectangle on rank 0, each part in `dtype` from the first rank that has it."""
        parts = [(common, self._transfer(name, common, rank, dtype)) for rank, common in self._owners(name, region)]
        if self._rank != 0:
            return torch.empty(0)
        if len(parts) == 1:
            return parts[0][1]
        rectangle = torch.empty([end - first for first, end in region], dtype=dtype)
        for common, part in parts:
            _cut(rectangle, region, common).copy_(part)
        return rectangle

    def _owners(self, name: str, region: Slices) -> Iterator[tuple[int, Slices]]:
        """Yield the ranks whose parts cover a rectangle, with the part of each; of replicas, only the first."""
        seen_places: set[Slices] = set()
        for rank, places in enumerate(self._places):
            place = places.get(name)
            if place is not None and place not in seen_places and (common := _common(place, region)) is not None:
                seen_places.add(place)
                yield rank, common

    def _transfer(self, name: str, common: Slices, rank: int, dtype: torch.dtype) -> Tensor:
        """Transfer a rank's part to rank 0; senders may be ahead by up to MAX_PENDING_BYTES."""
        if rank == self._rank:
            local, place = self._parts_by_name[name]
            part = _cut(local, place, common)
            if rank == 0:
                return part.cpu()
            self._send(part.to(dtype).cpu().contiguous().view(torch.uint8).flatten(), name)
            return torch.empty(0)
        if self._rank != 0:
            return torch.empty(0)
        sizes = [end - first for first, end in common]
        buffer = torch.empty(prod(sizes) * dtype.itemsize, dtype=torch.uint8)
        with collective(f"taking of {name} from rank {rank}"):
            dist.recv(buffer, rank)
        return buffer.view(dtype).view(sizes)

    def _send(self, buffer: Tensor, name: str) -> None:
        with collective(f"sending of {name} to rank 0"):
            work = dist.isend(buffer, 0)
            assert work is not None, "both ranks are of the group"
            self._pending.append((work, buffer))
            while (
                len(self._pending) > 1
                and sum(pending_buffer.nbytes for _, pending_buffer in self._pending) > MAX_PENDING_BYTES
            ):
                self._pending.popleft()[0].wait()

    def finish(self) -> None:
        while self._pending:
            with collective("sending of a part to rank 0"):
                self._pending.popleft()[0].wait()


def _common(place: Slices, region: Slices) -> Slices | None:
    """Intersection of two rectangles; None if empty."""
    overlap = tuple((max(first, low), min(end, high)) for (first, end), (low, high) in zip(place, region, strict=True))
    return overlap if all(first < end for first, end in overlap) else None


def _cut(tensor: Tensor, place: Slices, region: Slices) -> Tensor:
    """Part `region` of a tensor that covers the rectangle `place`."""
    for dim, ((first, _), (low, high)) in enumerate(zip(place, region, strict=True)):
        tensor = tensor.narrow(dim, low - first, high - low)
    return tensor
