"""Arbitrary rectangle of a tensor on one rank, for torch.distributed.checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True, eq=False)
class TensorPiece:
    """A rank's shard of a tensor; may be empty. If several ranks hold the same one, one of them writes it."""

    shape: torch.Size
    """Shape of the full tensor."""
    offsets: tuple[int, ...]
    find: Callable[[], Tensor]
    """Returns the current shard."""

    @property
    def local(self) -> Tensor:
        return self.find()

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        """Called by torch when saving: what this rank can write."""
        data = TensorWriteData(self._chunk, TensorProperties.create_from_tensor(self.local), self.shape)
        index = MetadataIndex(name, self._chunk.offsets)
        return [] if self._is_empty else [WriteItem(index, WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Called by torch when loading: what this rank reads."""
        return [] if self._is_empty else [self._chunk]

    @property
    def _is_empty(self) -> bool:
        return self.local.numel() == 0 and 0 not in self.shape

    @property
    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.local.shape)
