"""A folder in a store that is not a file system: files appear there completely or not at all."""

import errno
import os
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from moe.storage.confined import Outside
from moe.storage.folder import Folder

MAX_BYTES = 10


class _SmallFile(MemoryFile):
    """File of at most MAX_BYTES, which it keeps when there is no room for more."""

    def write(self, content: Any) -> int:
        if self.tell() + len(content) > MAX_BYTES:
            super().write(content[: MAX_BYTES - self.tell()])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(content)


class _SmallStore(MemoryFileSystem):
    """Store with folders and little room for each file, into which data is streamed, as over SFTP."""

    protocol = "small"
    store: dict[str, Any] = {}  # noqa: RUF012 - as its base has it
    pseudo_dirs = [""]  # noqa: RUF012
    pipe_file = AbstractFileSystem.pipe_file

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("small://")))

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode != "wb":
            return super()._open(path, mode, **kwargs)
        if self._parent(path) not in self.pseudo_dirs:
            raise FileNotFoundError(path)
        file = _SmallFile(self, path, b"")
        file.commit()
        return file


class _GrowingStore(MemoryFileSystem):
    """A store in which a file grows whenever its size is read."""

    protocol = "growing"

    def size(self, path: str) -> int:
        before = self.cat_file(path)
        self.pipe_file(path, before + b"more")
        return len(before)


@pytest.fixture(params=["memory", "small"])
def folder(request: pytest.FixtureRequest) -> Iterator[Folder]:
    fsspec.register_implementation("small", _SmallStore, clobber=True)
    folder = Folder(f"{request.param}://folder/job")
    yield folder
    folder.remove("")


def test_written_files_appear_when_they_are_complete(folder: Folder) -> None:
    folder.write("checkpoints/step/one", b"1")
    with folder.create("checkpoints/step/two") as file:
        file.write(b"2")
        assert folder.sizes("checkpoints/step").get("two") is None
    folder.write("checkpoints/step/one", b"once more")
    assert folder.names("checkpoints/step") == ["one", "two"]
    assert [folder.read(f"checkpoints/step/{name}") for name in ("one", "two")] == [b"once more", b"2"]


@pytest.mark.parametrize("path", ["../other", "one/../../other", "/folder/other"])
def test_no_path_leads_out_of_it(folder: Folder, path: str) -> None:
    sibling = Folder(folder.url.removesuffix("job") + "other")
    sibling.write("file", b"1")
    folder.write("one/file", b"1")
    operations: list[Callable[[str], Any]] = [
        folder.open, folder.read, folder.remove, folder.names, lambda path: folder.write(path, b"2"),
        lambda path: folder.create(path).__enter__(),
    ]  # fmt: skip
    for operation in operations:
        for outward in (path, f"{path}/file"):
            with pytest.raises(Outside):
                operation(outward)
    assert folder.sizes(path) == {}
    assert (sibling.names(), sibling.read("file")) == (["file"], b"1")
    sibling.remove("")


def test_a_growing_file_is_read_up_to_its_first_size() -> None:
    fsspec.register_implementation("growing", _GrowingStore, clobber=True)
    folder = Folder("growing://folder")
    folder.write("file", b"before")
    assert folder.read("file", max_bytes=6) == b"before"
    assert folder.read("file", 10, 100, max_bytes=6) == b""
    folder.remove("")


@pytest.mark.parametrize("before", [None, b"before"])
def test_an_interrupted_write_leaves_what_was_there(folder: Folder, before: bytes | None) -> None:
    folder.write("there", b"")
    if before is not None:
        folder.write("file", before)

    def fail_to_write() -> None:
        with folder.create("file") as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_to_write()
    if folder.url.startswith("small"):
        with pytest.raises(OSError, match="No space left"):
            folder.write("file", b"x" * (MAX_BYTES + 1))
    assert folder.names() == (["there"] if before is None else ["file", "there"])
    assert before is None or folder.read("file") == before


def test_at_most_one_claim_of_a_name_is_the_first(folder: Folder) -> None:
    answers = [folder.claim("a/driver", b"me") for _ in range(3)]
    assert answers == [True, False, False]
    assert folder.claim("a/driver-2", b"me")
