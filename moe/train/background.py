"""Work in a thread of its own."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Background(Generic[Result]):
    """Runs `work` at once in a daemon thread, which never keeps a process from ending."""

    def __init__(self, work: Callable[[], Result], name: str) -> None:
        self._work = work
        self._result: Result
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:  # handed to whoever asks for the result
            self.error = error

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()

    def result(self) -> Result:
        """Wait for the work and return its result. Raises what it raised."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self._result
