"""Prepares the built-in catalogs corpus, which most first jobs read, while Ray starts."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from service.cli.checks import available_memory_bytes

if TYPE_CHECKING:
    from moe.spec import CatalogsSpec, TranslationModelSpec

PATIENCE_S = 5.0
MIN_MEMORY_BYTES = 2 * 1024**3
"""Available memory below which nothing is prepared early. The preparation takes at most 0.63 GB."""


class EarlyCorpus:
    """Context with a process that prepares the catalogs corpus in the jobs' cache. It uses one thread, to leave a
    core to Ray. A job that starts meanwhile waits for it instead of preparing the corpus again."""

    def __init__(self, cache_dir: Path) -> None:
        self._cache_dir = cache_dir
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "EarlyCorpus":
        available = available_memory_bytes()
        if available is not None and available < MIN_MEMORY_BYTES:
            return self
        command = [sys.executable, "-m", "service.cli.early_corpus", str(self._cache_dir)]
        # Threads of `tokenizers`, and of OpenMP.
        environment = {**os.environ, "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with suppress(OSError):  # if it fails, the first job prepares the corpus
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C goes to the command, which ends this process
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def prepare_catalogs(cache_dir: Path, machine_dir: Path | None) -> Path:
    """Prepare the catalogs corpus with default settings; returns its folder in `cache_dir`. With `machine_dir`,
    which all control planes of this user share, it is built there once and linked into each `cache_dir`."""
    from moe.data.pairs import prepare

    return prepare(*catalogs(), cache_dir, shared_dir=machine_dir).folder


def catalogs() -> "tuple[CatalogsSpec, TranslationModelSpec]":
    """Data and model specs of the built-in catalogs and a preset, with defaults."""
    from moe.spec import CatalogsSpec, TranslationModelSpec

    return CatalogsSpec(corpus="catalogs"), TranslationModelSpec.model_validate({"preset": "gshard-tiny"})


def machine_cache() -> Path | None:
    """User's XDG cache folder for corpora; None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    try:
        cache = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
    except RuntimeError:
        return None
    return cache / "shardyard" / "corpora"


if __name__ == "__main__":
    prepare_catalogs(Path(sys.argv[1]), machine_cache())
