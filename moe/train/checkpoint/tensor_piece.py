"""Rectangles of tensors for torch.distributed.checkpoint; its plans and results as plain values, sent unpickled."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult


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
        """Called by torch when saving: items that this rank can write."""
        data = TensorWriteData(self._chunk, TensorProperties.create_from_tensor(self.local), self.shape)
        index = MetadataIndex(name, self._chunk.offsets)
        return [] if self._is_empty else [WriteItem(index, WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Called by torch when loading: chunks that this rank reads."""
        return [] if self._is_empty else [self._chunk]

    @property
    def _is_empty(self) -> bool:
        return self.local.numel() == 0 and 0 not in self.shape

    @property
    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.local.shape)


def plan_to_json(plan: SavePlan) -> dict[str, Any]:
    """Plain value of a save plan; inverse of `plan_of`."""
    return {"prefix": plan.storage_data and plan.storage_data.prefix, "items": list(map(_plain_item, plan.items))}


def plan_from_json(plain: dict[str, Any]) -> SavePlan:
    prefix = plain["prefix"] and _StoragePrefix(plain["prefix"])
    return SavePlan([_item_of(*plain_item) for plain_item in plain["items"]], storage_data=prefix)


def result_to_json(result: WriteResult) -> list[Any]:
    """Plain value of a write result; inverse of `result_of`."""
    location = result.storage_data
    location_fields = [location.relative_path, location.offset, location.length, location.transform_descriptors]
    return [_plain_index(result.index), result.size_in_bytes, location_fields]


def result_from_json(plain: list[Any]) -> WriteResult:
    index, size_bytes, location_fields = plain
    return WriteResult(MetadataIndex(*index), size_bytes, _StorageInfo(*location_fields))


def _plain_item(item: WriteItem) -> list[Any]:
    tensor = item.tensor_data
    assert tensor is not None, "our checkpoints contain only tensors"
    chunk, dtype = tensor.chunk, str(tensor.properties.dtype).removeprefix("torch.")
    return [_plain_index(item.index), item.type.name, list(chunk.offsets), list(chunk.sizes), list(tensor.size), dtype]


def _item_of(
    index: list[Any], kind: str, offsets: list[int], sizes: list[int], full_shape: list[int], dtype: str
) -> WriteItem:
    tensor = TensorWriteData(
        chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
        properties=TensorProperties(getattr(torch, dtype)),
        size=torch.Size(full_shape),
    )
    return WriteItem(MetadataIndex(*index), WriteItemType[kind], tensor_data=tensor)


def _plain_index(index: MetadataIndex) -> list[Any]:
    return [index.fqn, None if index.offset is None else list(index.offset), index.index]
