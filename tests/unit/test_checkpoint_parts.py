"""Rectangles of a checkpoint's tensors, read without the rest of them."""

from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe.storage.folder import Folder
from moe.train.checkpoint.parts import StoredParts
from moe.train.checkpoint.piece import TensorPiece
from moe.train.checkpoint.shards import ShardWriter

TENSORS = {
    "matrix": torch.randn(40, 30),
    "narrow": torch.randn(7).bfloat16(),
    "turned": torch.randn(6, 5, 4).transpose(0, 1),
    "of experts": torch.randn(8, 3, 5, dtype=torch.float64),
    "number": torch.tensor(3.0),
}


def written(folder: Path, tensors: dict[str, torch.Tensor | TensorPiece]) -> Folder:
    where, writer = Folder(str(folder)), ShardWriter(tensors)
    writer.stage()
    writer.finish(where, [writer.write(where)])
    return where


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_rectangle_is_that_of_the_tensor(data: st.DataObject, tmp_path: Path):
    folder = tmp_path / "checkpoint"
    where = Folder(str(folder)) if folder.exists() else written(folder, dict(TENSORS))
    parts = StoredParts(where)
    assert parts.names() == sorted(TENSORS)
    name = data.draw(st.sampled_from(parts.names()))
    tensor = TENSORS[name]
    assert parts.shape(name) == tuple(tensor.shape)
    within = []
    for size in tensor.shape:
        first = data.draw(st.integers(0, size))
        within.append((first, data.draw(st.integers(first, size))))
    found = parts.read(name, tuple(within))
    assert torch.equal(found, tensor[tuple(slice(*each) for each in within)])
    assert found.dtype == tensor.dtype


def test_no_more_is_read_than_the_rows_asked_for(tmp_path: Path, monkeypatch):
    where = written(tmp_path / "checkpoint", {"matrix": torch.randn(1000, 100)})
    parts, read = StoredParts(where), []
    # Fakes nothing: it notes how much each read asks for, and reads it.
    whole = Folder.read
    monkeypatch.setattr(
        Folder, "read", lambda self, *args, **more: read.append(more["max_bytes"]) or whole(self, *args, **more)
    )
    parts.read("matrix", ((10, 12), (0, 100)))
    assert read == [2 * 100 * 4]
