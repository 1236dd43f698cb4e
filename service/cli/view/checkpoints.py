"""Verification of a checkpoint, in words."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from service.cli.view.amounts import num_bytes
from service.cli.view.printable import printable
from service.wire.verification import CheckpointVerification


@contextmanager
def verification_spinner(checkpoint: str, checkpoints: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """A spinner on standard error, if that is a terminal, with the checkpoint's name, its size and the time that has
    passed. The service answers only at the end, so there is no share of bytes to show."""
    console = Console(stderr=True, highlight=False, emoji=False, markup=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(verification_text(checkpoint, checkpoints), total=None)
        yield


def verification_text(checkpoint: str, checkpoints: Sequence[Mapping[str, Any]]) -> str:
    """`verifying step-00000004.a1.g0, 2 files, 1.24 GiB`: the newest checkpoint of a step, or the one of a name."""
    of_choice = [item for item in checkpoints if checkpoint in (str(item["step"]), item["name"])]
    if not of_choice:
        return f"verifying {printable(checkpoint)}"
    item = of_choice[-1]
    size = "" if item["size_bytes"] is None else f", {num_bytes(item['size_bytes'])}"
    return f"verifying {printable(item['name'])}, {_files(item['num_files'])}{size}"


def _files(num_files: int) -> str:
    return f"{num_files:,} file{'' if num_files == 1 else 's'}"


def verification_lines(verification: CheckpointVerification) -> list[str]:
    """The verdict, and a line for each fault."""
    name, files = printable(verification.name), _files(verification.num_files)
    size = num_bytes(verification.num_bytes)
    if verification.is_intact:
        return [f"{name} is intact: {files}, {size}, match its marker"]
    num_faults = len(verification.faults)
    return [
        f"{name} is damaged: {num_faults:,} fault{'' if num_faults == 1 else 's'} in {files}, {size} read",
        *(f"  {printable(str(fault))}" for fault in verification.faults),
    ]
