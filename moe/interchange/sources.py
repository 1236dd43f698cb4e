"""Where the parameters come from that are written: anything that gives a rectangle of one by its name."""

from abc import ABC, abstractmethod
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe.interchange.pieces import Slices
from moe.parallel import Layout, extent, local_parameters, part_of, together
from moe.parallel.collective import collective


class Source(ABC):
    """A model's parameters and buffers, in parts."""

    is_collective = False
    """Whether all ranks read the same together, and rank 0 alone gets it."""

    @abstractmethod
    def read(self, name: str, within: Slices) -> Tensor:
        """A rectangle of a parameter or buffer, on the CPU, not to be written to."""


class ModelSource(Source):
    """A model in memory, with all of its parameters here or a part of each on every rank of its layout."""

    def __init__(self, model: nn.Module, layout: Layout | None = None) -> None:
        layout = layout or Layout.single()
        self.is_collective = layout.world_size > 1
        self._here: dict[str, tuple[Tensor, Slices]] = {
            each.name: (each.local.detach(), extent(each.part, layout)) for each in local_parameters(model)
        }
        for name, buffer in model.named_buffers():
            self._here[name] = buffer.detach(), extent(part_of(buffer), layout)
        self._rank = together.rank()
        places = {name: within for name, (_, within) in self._here.items()}
        self._places = [
            {name: tuple(map(tuple, within)) for name, within in each.items()}
            for each in together.all_gathered(places)
        ]

    def read(self, name: str, within: Slices) -> Tensor:
        if not self.is_collective:
            local, place = self._here[name]
            return _cut(local, place, within).cpu()
        return self._gathered(name, within)

    def _gathered(self, name: str, within: Slices) -> Tensor:
        """The rectangle on rank 0, of the first rank that has each part of it."""
        found = torch.empty(0)
        seen: set[Slices] = set()
        for rank, places in enumerate(self._places):
            place = places.get(name)
            if place is None or place in seen or (common := _common(place, within)) is None:
                continue
            seen.add(place)
            if self._rank not in (0, rank):
                continue
            part = self._sent(name, common, rank)
            if self._rank == 0:
                if found.numel() == 0:
                    found = torch.empty([end - first for first, end in within], dtype=part.dtype)
                _cut(found, within, common).copy_(part)
        return found

    def _sent(self, name: str, common: Slices, rank: int) -> Tensor:
        """A part that a rank has, on that rank and on rank 0."""
        if rank == self._rank:
            local, place = self._here[name]
            part = _cut(local, place, common).cpu().contiguous()
            if rank != 0:
                with collective(f"sending of {name} to rank 0"):
                    dist.send(part.view(torch.uint8).flatten(), 0)
            return part
        dtype = self._here[name][0].dtype
        sizes = [end - first for first, end in common]
        packed = torch.empty(prod(sizes) * dtype.itemsize, dtype=torch.uint8)
        with collective(f"taking of {name} from rank {rank}"):
            dist.recv(packed, rank)
        return packed.view(dtype).view(sizes)


def _common(place: Slices, within: Slices) -> Slices | None:
    """What two rectangles have in common; None where that is nothing."""
    found = tuple(
        (max(first, low), min(end, high)) for (first, end), (low, high) in zip(place, within, strict=True)
    )
    return found if all(first < end for first, end in found) else None


def _cut(tensor: Tensor, place: Slices, within: Slices) -> Tensor:
    """A rectangle of a tensor that lies at a place."""
    for dim, ((first, _), (low, high)) in enumerate(zip(place, within, strict=True)):
        tensor = tensor.narrow(dim, low - first, high - low)
    return tensor
