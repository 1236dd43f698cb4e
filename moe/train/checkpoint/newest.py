"""Newest or best intact checkpoint in a job's storage. No torch."""

from moe.storage.folder import Folder
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.run_files import best_committed


class NoCheckpoint(Exception):
    """Storage without an intact checkpoint; the message lists what it has."""


def best_complete(storage: Folder) -> str:
    """URL of the best committed checkpoint (`checkpoint.keep_best`); reads all its files.

    Raises NoCheckpoint if there is none, or if it does not match its marker; OSError.
    """
    checkpoints = storage.subfolder(markers.FOLDER)
    if (name := best_committed(checkpoints)) is None:
        raise NoCheckpoint(
            f"the best checkpoint is not under {checkpoints.url}; a job with train.evaluation.every_steps and "
            "checkpoint.keep_best keeps it"
        )
    if (fault := fault_of(checkpoints, name)) is not None:
        raise NoCheckpoint(f"the best checkpoint {checkpoints.url_of(name)} cannot be used: {fault}")
    return checkpoints.url_of(name)


def newest_complete(storage: Folder) -> str:
    """URL of the newest committed checkpoint that matches its marker; reads all its files.

    Raises NoCheckpoint if there is none.
    """
    checkpoints, faults = storage.subfolder(markers.FOLDER), list[str]()
    for name in markers.list_committed(checkpoints):
        if (fault := fault_of(checkpoints, name)) is None:
            return checkpoints.url_of(name)
        faults.append(f"{name}: {fault}")
    if faults:
        raise NoCheckpoint(f"no checkpoint under {checkpoints.url} is complete\n" + "\n".join(faults))
    raise NoCheckpoint(f"there is no committed checkpoint under {checkpoints.url} yet")


def fault_of(checkpoints: Folder, name: str) -> str | None:
    """Fault of a checkpoint with a marker, or None."""
    try:
        return markers.fault(checkpoints, markers.read(checkpoints, name))
    except (ValueError, FileNotFoundError) as error:
        return str(error) or "it has no marker"
