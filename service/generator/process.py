"""Parent's side of a generator process, for use on one event loop."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

from pydantic import ValidationError

from moe.spec import Problem, SpecError
from moe.spec.generation import GenerationSpec
from service.generator.messages import GeneratorMessage, Load, Order, TextRequest

MAX_LINE_BYTES = 1 << 24
BREAK_OFF_S = 5.0
"""Longest wait for a cancellation before the process is killed; beam search only checks at its end."""


class GeneratorError(Exception):
    """Loading failed, or the process died; the message gives the reason."""


class GeneratorProcess:
    """Process with one loaded model; ends with `end` or with this process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self._number = process, 0

    @classmethod
    async def start(cls, load: Load) -> "GeneratorProcess":
        """Start a process that loads the model; `wait_until_loaded` waits for it."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "service.generator.child",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MAX_LINE_BYTES,
            env=_environment(os.environ), start_new_session=True,
        )  # fmt: skip
        generator_process = cls(process)
        generator_process._tell(Order(load=load))
        return generator_process

    @property
    def runs(self) -> bool:
        return self._process.returncode is None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_until_loaded(self) -> None:
        """Wait for the model. Raises GeneratorError if loading fails."""
        message = await self._read_message()
        if message.kind != "loaded":
            raise GeneratorError(message.words)

    async def stream_messages(self, prompt: str, spec: GenerationSpec) -> AsyncIterator[GeneratorMessage]:
        """Messages of one text: `begun`, `text`s, `end`. One text at a time. Raises SpecError for an unsupported
        request, GeneratorError."""
        self._number += 1
        self._tell(Order(generate=TextRequest(number=self._number, prompt=prompt, spec=spec)))
        while True:
            message = await self._read_message()
            match message.kind:
                case "refused":
                    raise SpecError([Problem(**fields) for fields in message.problems])
                case "failed":
                    raise GeneratorError(message.words)
            yield message
            if message.kind == "end":
                return

    async def break_off(self) -> None:
        """Cancel the current text; kills the process if that takes too long."""
        self._tell(Order(break_off=self._number))
        try:
            async with asyncio.timeout(BREAK_OFF_S):
                while (await self._read_message()).kind not in ("end", "refused", "failed"):
                    pass
        except (TimeoutError, GeneratorError):
            await self.end()

    async def end(self) -> None:
        """Kill the process and wait for it."""
        if self._process.returncode is None:
            # Not `Process.kill`, which would take the exit status of a dead process from the event loop.
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _tell(self, order: Order) -> None:
        assert self._process.stdin is not None
        # No drain: a line is small.
        self._process.stdin.write(order.model_dump_json(exclude_defaults=True).encode() + b"\n")

    async def _read_message(self) -> GeneratorMessage:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        try:
            if line.endswith(b"\n"):
                return GeneratorMessage.model_validate_json(line)
        except ValidationError:
            pass
        await self.end()
        status = self._process.returncode or 0
        cause = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        raise GeneratorError(f"the generating process ended ({cause}); see the service's log")


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment without the service's settings, which include its token."""
    return {name: value for name, value in environment.items() if not name.startswith("SHARDYARD_")}
