"""Copying of committed checkpoints between jobs: verified in transit, committed last. No torch."""

import hashlib
import posixpath
from collections.abc import Callable, Iterator

from moe.storage.folder import Folder
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.marker import FileSeal, Marker

_BLOCK_BYTES = 1 << 20


class DamagedCheckpoint(ValueError):
    """Checkpoint that does not match its marker or cannot be read."""


class CopyInterrupt(Exception):
    """Copying stopped because its process is about to end."""


def copy_checkpoint(
    checkpoints: Folder, marker: Marker, destination: Folder, should_stop: Callable[[], bool] = lambda: False
) -> Marker:
    """Copy a checkpoint into the folder `destination` as attempt 0; return its new marker.

    Content is verified in transit. The marker comes last, after all files are durable: a killed process leaves an
    intact checkpoint or none. `should_stop` is polled. Raises DamagedCheckpoint, CopyInterrupt, and OSError if
    `destination` cannot be written.
    """
    copy = marker.model_copy(update={"attempt": 0, "group": 0})
    for path, seal in marker.files.items():
        if posixpath.isabs(path) or ".." in path.split("/"):
            raise DamagedCheckpoint(f"its marker names {path!r}, which is outside the checkpoint")
        with destination.create(f"{copy.name}/{path}") as stream:
            for block in _checked_blocks(checkpoints, f"{marker.name}/{path}", seal):
                if should_stop():
                    raise CopyInterrupt
                stream.write(block)
    destination.write(copy.name + markers.SUFFIX, copy.to_bytes())
    return copy


def _checked_blocks(checkpoints: Folder, path: str, seal: FileSeal) -> Iterator[bytes]:
    """Blocks of a file. Raises DamagedCheckpoint if unreadable, or at the end if it does not match its seal."""
    digest, size_bytes = hashlib.sha256(), 0
    try:
        with checkpoints.open(path) as stream:
            while block := stream.read(_BLOCK_BYTES):
                digest.update(block)
                size_bytes += len(block)
                if size_bytes > seal.size_bytes:
                    raise DamagedCheckpoint(f"{path} has more than its {seal.size_bytes} written bytes")
                yield block
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error
    if size_bytes != seal.size_bytes:
        raise DamagedCheckpoint(f"{path} has {size_bytes} bytes instead of {seal.size_bytes}")
    if digest.hexdigest() != seal.sha256:
        raise DamagedCheckpoint(f"the checksum of {path} differs from the written one")
