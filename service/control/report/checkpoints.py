"""Committed checkpoints of a job, as their markers on storage say."""

from contextlib import suppress
from dataclasses import replace

from moe.records import StoredCheckpoint
from moe.storage.folder import Folder
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.run_files import best_committed


def list_checkpoints(storage: Folder) -> list[StoredCheckpoint]:
    """Committed checkpoints, oldest first; one with an unreadable marker has a `fault`. Raises OSError."""
    folder = storage.subfolder(markers.FOLDER)
    checkpoints = [_describe(folder, name) for name in reversed(markers.list_committed(folder))]
    with suppress(OSError):  # a state that cannot be read does not hide the others
        best = best_committed(folder)
        return [replace(checkpoint, best=True) if checkpoint.name == best else checkpoint for checkpoint in checkpoints]
    return checkpoints


def _describe(folder: Folder, name: str) -> StoredCheckpoint:
    step, attempt, group = markers.order(name) or (0, 0, 0)
    checkpoint = StoredCheckpoint(name, step, attempt, group, path=folder.url_of(name), fault=None)
    try:
        marker = markers.read(folder, name)
    except FileNotFoundError:
        # Removed since the listing, by `checkpoint.keep`.
        return replace(checkpoint, fault="was just removed")
    except ValueError as error:
        return replace(checkpoint, fault=str(error))
    except OSError as error:  # of this checkpoint only: the folder was listed
        return replace(checkpoint, fault=f"its marker cannot be read: {error.strerror or error}")
    return replace(
        checkpoint,
        created_at=marker.created_at,
        num_workers=marker.num_workers,
        num_files=len(marker.files),
        size_bytes=marker.size_bytes,
    )
