"""Future of a function that runs in its own thread."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class BackgroundCall(Generic[Result]):
    """Runs `work` in a daemon thread, which never keeps the process alive."""

    def __init__(self, work: Callable[[], Result], name: str) -> None:
        self._work = work
        self._result: Result
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:  # re-raised by `result`
            self.error = error

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()

    def result(self) -> Result:
        """Wait for the result of `work`, or raise its exception."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self._result
