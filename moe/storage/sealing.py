"""File seals: size and SHA-256 of written content, and their verification."""

import hashlib
import io
import os
from typing import Any

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


def fault(folder: Folder, path: str, size_bytes: int, sha256: str, label: str | None = None) -> str | None:
    """Fault of a sealed file, called `label` in the message, or None.

    An UnreadableStorage if the storage cannot deliver a file that may be there.
    """
    label = label or path
    try:
        with folder.open(path) as stream:
            stream.seek(0, os.SEEK_END)  # seek returns None for files of some stores
            if (actual_bytes := stream.tell()) != size_bytes:
                return f"{label} has {actual_bytes} bytes instead of {size_bytes}"
            stream.seek(0)
            digest, num_read = hashlib.sha256(), 0
            while block := stream.read(_BLOCK_BYTES):
                digest.update(block)
                num_read += len(block)
                if num_read > size_bytes:
                    return f"{label} grew beyond {size_bytes} bytes while it was read"
    except FileNotFoundError:
        return f"{label} is missing"
    except OSError as error:
        return UnreadableStorage(f"{label} cannot be read: {error}")
    if digest.hexdigest() != sha256:
        return f"the checksum of {label} differs from the written one"
    return None
