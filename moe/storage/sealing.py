"""File seals: size and SHA-256 of written content, and their verification."""

import hashlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from moe.storage.folder import Folder

_BLOCK_BYTES = 1 << 20


class UnreadableStorage(str):
    """Fault of the storage, not of the file, which may be intact."""


class SealingStream(io.RawIOBase):
    """Stream that hashes what is written through it, not what the disk later returns."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._digest, self.size_bytes = stream, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        block = memoryview(content).cast("B")
        self._stream.write(block)
        self._digest.update(block)
        self.size_bytes += len(block)
        return len(block)

    def tell(self) -> int:
        return self.size_bytes

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


@dataclass(frozen=True)
class FileFault:
    """Rule that a sealed file breaks."""

    code: Literal["missing", "corrupt", "unreadable"]
    rule: str
    """Predicate of the file, such as `is missing`."""
    value: int | None = None
    """Its actual bytes, if they are wrong."""


def check(
    folder: Folder, path: str, size_bytes: int, sha256: str, on_block: Callable[[int], None] = lambda num_bytes: None
) -> FileFault | None:
    """Fault of a sealed file, or None. `on_block` is called with the bytes of each block read, and may raise to end
    the check."""
    try:
        with folder.open(path) as stream:
            stream.seek(0, os.SEEK_END)  # seek returns None for files of some stores
            if (actual_bytes := stream.tell()) != size_bytes:
                return FileFault("corrupt", f"has {actual_bytes} bytes instead of {size_bytes}", actual_bytes)
            stream.seek(0)
            digest, num_read = hashlib.sha256(), 0
            while block := stream.read(_BLOCK_BYTES):
                digest.update(block)
                num_read += len(block)
                on_block(len(block))
                if num_read > size_bytes:
                    return FileFault("corrupt", f"grew beyond {size_bytes} bytes while it was read", num_read)
    except FileNotFoundError:
        return FileFault("missing", "is missing")
    except OSError as error:
        return FileFault("unreadable", f"cannot be read: {error}")
    return None if digest.hexdigest() == sha256 else FileFault("corrupt", "does not match its checksum")


def fault(folder: Folder, path: str, size_bytes: int, sha256: str, label: str | None = None) -> str | None:
    """Fault of a sealed file, called `label` in the message, or None.

    An UnreadableStorage if the storage cannot deliver a file that may be there.
    """
    file_fault = check(folder, path, size_bytes, sha256)
    if file_fault is None:
        return None
    text = f"{label or path} {file_fault.rule}"
    return UnreadableStorage(text) if file_fault.code == "unreadable" else text
