"""What runs on this machine, found by what it was given."""

import psutil


def with_environment(name: str, value: str) -> list[psutil.Process]:
    """Processes that have this variable with this value."""
    return [process for process in psutil.process_iter() if _bears(process, name, value)]


def _bears(process: psutil.Process, name: str, value: str) -> bool:
    try:
        return process.environ().get(name) == value
    except (psutil.Error, OSError):
        return False
