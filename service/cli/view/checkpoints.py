"""Verification of a checkpoint, in words."""

from service.cli.view.amounts import num_bytes
from service.cli.view.printable import printable
from service.wire.verification import CheckpointVerification


def verification_lines(verification: CheckpointVerification) -> list[str]:
    """The verdict, and a line for each fault."""
    name, num_files = printable(verification.name), verification.num_files
    files = f"{num_files:,} file{'' if num_files == 1 else 's'}"
    size = num_bytes(verification.num_bytes)
    if verification.is_intact:
        return [f"{name} is intact: {files}, {size}, match its marker"]
    num_faults = len(verification.faults)
    return [
        f"{name} is damaged: {num_faults:,} fault{'' if num_faults == 1 else 's'} in {files}, {size} read",
        *(f"  {printable(str(fault))}" for fault in verification.faults),
    ]
