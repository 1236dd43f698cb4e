"""A committed checkpoint copied to another job's storage: checked on the way, and committed there last. No torch."""

import hashlib
import posixpath
from collections.abc import Callable, Iterator

from moe.storage.folder import Folder
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.marker import FileSeal, Marker

_BLOCK_BYTES = 1 << 20


class DamagedCheckpoint(ValueError):
    """A checkpoint is not what its marker says, or cannot be read; the message says how."""


class CopyInterrupt(Exception):
    """The copy was given up because its process is about to end."""


def copy_checkpoint(
    checkpoints: Folder, marker: Marker, to: Folder, should_stop: Callable[[], bool] = lambda: False
) -> Marker:
    """Copies a checkpoint to other `checkpoints`, as one of before the first attempt; answers with its marker there.

    What is read is checked as it is written, and the marker comes last, when all of it is durable: whenever this is
    killed, there is a whole checkpoint or none. `should_stop` is asked now and then. Raises DamagedCheckpoint,
    CopyInterrupt, and OSError where `to` cannot be written.
    """
    copy = marker.model_copy(update={"attempt": 0, "group": 0})
    for path, seal in marker.files.items():
        if posixpath.isabs(path) or ".." in path.split("/"):
            raise DamagedCheckpoint(f"its marker names {path!r}, which lies elsewhere")
        with to.create(f"{copy.name}/{path}") as stream:
            for block in _checked_blocks(checkpoints, f"{marker.name}/{path}", seal):
                if should_stop():
                    raise CopyInterrupt
                stream.write(block)
    to.write(copy.name + markers.SUFFIX, copy.to_bytes())
    return copy


def _checked_blocks(checkpoints: Folder, path: str, seal: FileSeal) -> Iterator[bytes]:
    """The content of a file. Raises DamagedCheckpoint, at its end where it is not what was sealed."""
    digest, size_bytes = hashlib.sha256(), 0
    try:
        with checkpoints.open(path) as stream:
            while block := stream.read(_BLOCK_BYTES):
                digest.update(block)
                size_bytes += len(block)
                if size_bytes > seal.size_bytes:
                    raise DamagedCheckpoint(
                        f"{path} has more than the {seal.size_bytes} bytes that were written"
                    )
                yield block
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error
    if size_bytes != seal.size_bytes:
        raise DamagedCheckpoint(f"{path} has {size_bytes} bytes instead of {seal.size_bytes}")
    if digest.hexdigest() != seal.sha256:
        raise DamagedCheckpoint(f"{path} does not have the checksum of what was written")
