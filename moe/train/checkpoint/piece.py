"""A rank's part of a tensor, of any size and at any place in it, as torch.distributed.checkpoint takes it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True, eq=False)
class TensorPiece:
    """A rank's piece of a tensor. It may be empty. If several ranks have the same piece, one of them writes it."""

    shape: torch.Size
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    find: Callable[[], Tensor]
    """The part as it is now."""

    @property
    def local(self) -> Tensor:
        return self.find()

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        """Called by torch: the parts that this rank could write."""
        data = TensorWriteData(self._chunk, TensorProperties.create_from_tensor(self.local), self.shape)
        index = MetadataIndex(name, self._chunk.offsets)
        return [] if self._is_empty else [WriteItem(index, WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Called by torch: the parts that this rank reads."""
        return [] if self._is_empty else [self._chunk]

    @property
    def _is_empty(self) -> bool:
        return self.local.numel() == 0 and 0 not in self.shape

    @property
    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.local.shape)
