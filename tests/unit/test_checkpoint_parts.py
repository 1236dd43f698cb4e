"""Rectangles of a checkpoint's tensors, read without the rest of the file."""

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.storage.folder import Folder
from moe.train.checkpoint.parts import StoredParts
from moe.train.checkpoint.shards import ShardWriter

TENSORS = {
    "matrix": torch.randn(40, 30),
    "narrow": torch.randn(7).bfloat16(),
    "turned": torch.randn(6, 5, 4).transpose(0, 1),
    "of experts": torch.randn(8, 3, 5, dtype=torch.float64),
    "number": torch.tensor(3.0),
}


def write(folder: Folder, tensors: dict[str, torch.Tensor]) -> Folder:
    writer = ShardWriter(tensors)
    writer.stage()
    writer.finish(folder, [writer.write(folder)])
    return folder


@given(data=st.data())
def test_any_rectangle_equals_that_of_the_tensor(data: st.DataObject, tmp_path_factory) -> None:
    parts = StoredParts(write(Folder(str(tmp_path_factory.mktemp("checkpoint"))), dict(TENSORS)))
    assert parts.names() == sorted(TENSORS)
    name = data.draw(st.sampled_from(parts.names()))
    tensor = TENSORS[name]
    assert parts.shape(name) == tuple(tensor.shape)
    rectangle = []
    for size in tensor.shape:
        first = data.draw(st.integers(0, size))
        rectangle.append((first, data.draw(st.integers(first, size))))
    part = parts.read(name, tuple(rectangle))
    assert torch.equal(part, tensor[tuple(slice(*ends) for ends in rectangle)])
    assert part.dtype == tensor.dtype


def test_only_the_requested_rows_are_read(tmp_path: Path, monkeypatch) -> None:
    parts, read_bytes = StoredParts(write(Folder(str(tmp_path)), {"matrix": torch.randn(1000, 100)})), []
    read = Folder.read

    def read_and_record(self, *args, **kwargs):  # reads normally, and records the number of bytes
        read_bytes.append(kwargs["max_bytes"])
        return read(self, *args, **kwargs)

    monkeypatch.setattr(Folder, "read", read_and_record)
    parts.read("matrix", ((10, 12), (0, 100)))
    assert read_bytes == [2 * 100 * 4]
