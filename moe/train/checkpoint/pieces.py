"""torch.distributed.checkpoint plans and write results as plain values, to send without pickle.

All items are tensors or shards of tensors.
"""

from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult


def plain_plan(plan: SavePlan) -> dict[str, Any]:
    """Plain value of a save plan; inverse of `plan_of`."""
    return {"prefix": plan.storage_data and plan.storage_data.prefix, "items": list(map(_plain_item, plan.items))}


def plan_of(plain: dict[str, Any]) -> SavePlan:
    prefix = plain["prefix"] and _StoragePrefix(plain["prefix"])
    return SavePlan([_item_of(*plain_item) for plain_item in plain["items"]], storage_data=prefix)


def plain_result(result: WriteResult) -> list[Any]:
    """Plain value of a write result; inverse of `result_of`."""
    lies = result.storage_data
    where = [lies.relative_path, lies.offset, lies.length, lies.transform_descriptors]
    return [_plain_index(result.index), result.size_in_bytes, where]


def result_of(plain: list[Any]) -> WriteResult:
    index, size_bytes, where = plain
    return WriteResult(MetadataIndex(*index), size_bytes, _StorageInfo(*where))


def _plain_item(item: WriteItem) -> list[Any]:
    tensor = item.tensor_data
    assert tensor is not None, "a checkpoint of ours holds nothing but tensors"
    chunk, dtype = tensor.chunk, str(tensor.properties.dtype).removeprefix("torch.")
    return [_plain_index(item.index), item.type.name, list(chunk.offsets), list(chunk.sizes), list(tensor.size), dtype]


def _item_of(
    index: list[Any], kind: str, offsets: list[int], sizes: list[int], whole: list[int], dtype: str
) -> WriteItem:
    tensor = TensorWriteData(
        chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
        properties=TensorProperties(getattr(torch, dtype)),
        size=torch.Size(whole),
    )
    return WriteItem(MetadataIndex(*index), WriteItemType[kind], tensor_data=tensor)


def _plain_index(index: MetadataIndex) -> list[Any]:
    return [index.fqn, None if index.offset is None else list(index.offset), index.index]
