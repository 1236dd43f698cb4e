"""The newest whole checkpoint of a job's storage. Loads no torch."""

from moe.storage.folder import Folder
from moe.train.checkpoint import marker as markers


class NoCheckpoint(Exception):
    """A storage without a whole checkpoint; the message says what is there."""


def newest_whole(storage: Folder) -> str:
    """URL of the newest committed checkpoint whose files are as its marker says; each is read through to see that.

    Raises NoCheckpoint where there is none.
    """
    checkpoints, faults = storage.below(markers.FOLDER), list[str]()
    for name in markers.list_committed(checkpoints):
        if (fault := fault_of(checkpoints, name)) is None:
            return checkpoints.url_of(name)
        faults.append(f"{name}: {fault}")
    if faults:
        raise NoCheckpoint(f"no checkpoint under {checkpoints.url} is whole\n" + "\n".join(faults))
    raise NoCheckpoint(f"there is no committed checkpoint under {checkpoints.url} yet")


def fault_of(checkpoints: Folder, name: str) -> str | None:
    """Fault of a checkpoint that is said to be committed; None where there is none."""
    try:
        return markers.fault(checkpoints, markers.read(checkpoints, name))
    except (ValueError, FileNotFoundError) as error:
        return str(error) or "it has no marker"
