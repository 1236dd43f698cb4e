"""Text generation: one model loaded and one text at a time, in a separate process."""

import asyncio
from dataclasses import dataclass

import structlog

from moe.spec.generation import GenerationSpec
from service.control.errors import Conflict, ServiceError, Unavailable
from service.generator.messages import GeneratorMessage, Load
from service.generator.process import GeneratorError, GeneratorProcess

MAX_WAITING = 8
"""Maximum number of requests waiting for their turn."""
TURN_S = 60.0
"""Longest wait for a turn."""
RETRY_AFTER_S = 5
log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """A job's model and its newest checkpoint."""

    job_id: str
    checkpoint: str
    """Name of the newest committed checkpoint; another one requires a reload."""
    storage: str
    root: str | None


@dataclass(frozen=True)
class GenerationLimits:
    timeout_s: float
    load_timeout_s: float
    idle_s: float
    memory_bytes: int | None = None


class Generation:
    """A text being generated."""

    def __init__(self) -> None:
        self.start_future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the prompt is accepted, or with the error."""
        self._messages: asyncio.Queue[GeneratorMessage | ServiceError] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._is_over = False
        """Whether no more messages follow."""

    def made_by(self, task: "asyncio.Task[None]") -> None:
        self._task = task

    def put(self, message: GeneratorMessage) -> None:
        if message.kind == "begun":
            self.start_future.set_result(None)
        else:
            self._is_over = message.kind == "end"
            self._messages.put_nowait(message)

    def fail(self, error: Exception) -> None:
        self._is_over = True
        if not self.start_future.done():
            self.start_future.set_exception(error)
        else:
            self._messages.put_nowait(
                error if isinstance(error, ServiceError) else Unavailable(f"generation stopped early: {error}")
            )

    async def next(self, timeout_s: float) -> GeneratorMessage | None:
        """Next message, up to `end`; None on timeout. Raises ServiceError."""
        try:
            async with asyncio.timeout(timeout_s):
                message = await self._messages.get()
        except TimeoutError:
            return None
        if isinstance(message, ServiceError):
            raise message
        return message

    def leave(self) -> None:
        """Cancel the text, unless finished."""
        if self._task is not None and not self._is_over:
            self._task.cancel()


class Generations:
    """Generates texts on one event loop. Requests take turns in order of arrival; a job's model is loaded on its
    turn and replaces the previous one."""

    def __init__(self, limits: GenerationLimits) -> None:
        self._limits, self._turn, self._num_waiting = limits, asyncio.Lock(), 0
        self._process: GeneratorProcess | None = None
        self._loaded_model: ServedModel | None = None
        self._unloading: asyncio.TimerHandle | None = None
        self._tasks = set[asyncio.Task[None]]()
        self._is_closed = False

    async def begin(self, model: ServedModel, prompt: str, spec: GenerationSpec) -> Generation:
        """Start a text. Raises SpecError for an unsupported request, Conflict if the model cannot be loaded,
        Unavailable if the turn does not come in time or limits are exceeded."""
        await self._take_turn()
        generation = Generation()
        task = asyncio.create_task(self._make(generation, model, prompt, spec))
        generation.made_by(task)
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._release_turn(generation, task))
        try:
            await asyncio.shield(generation.start_future)
        except asyncio.CancelledError:
            generation.leave()
            raise
        return generation

    async def close(self) -> None:
        """Cancel the current text and end the process."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._unload()

    async def _take_turn(self) -> None:
        if self._num_waiting >= MAX_WAITING:
            raise _busy("the generator is busy and its queue is full")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(TURN_S):
                await self._turn.acquire()
        except TimeoutError:
            raise _busy(f"the generator has been busy for {TURN_S:g} s") from None
        finally:
            self._num_waiting -= 1
        if self._is_closed:
            self._turn.release()
            raise Unavailable("this service is stopping")

    def _release_turn(self, generation: Generation, task: asyncio.Task[None]) -> None:
        """Release the turn; also called for a task cancelled before it began."""
        self._tasks.discard(task)
        if not generation.start_future.done():
            generation.fail(self._cancellation_error())
        loop = asyncio.get_running_loop()
        self._unloading = loop.call_later(self._limits.idle_s, self._unload_soon)
        self._turn.release()

    def _cancellation_error(self) -> Unavailable:
        return Unavailable("this service is stopping" if self._is_closed else "the client stopped reading")

    async def _make(self, generation: Generation, model: ServedModel, prompt: str, spec: GenerationSpec) -> None:
        if self._unloading is not None:
            self._unloading.cancel()
        try:
            process = await self._process_of(model)
            await self._tell_all(generation, process, prompt, spec)
        except asyncio.CancelledError:
            generation.fail(self._cancellation_error())
        except Exception as error:
            generation.fail(error)

    async def _tell_all(
        self, generation: Generation, process: GeneratorProcess, prompt: str, spec: GenerationSpec
    ) -> None:
        limit_s = self._limits.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                async for message in process.stream_messages(prompt, spec):
                    generation.put(message)
        except TimeoutError:
            generation.fail(Unavailable(f"generation exceeded its time limit of {limit_s:g} s"))
            await process.break_off()
        except asyncio.CancelledError:
            await (process.end() if self._is_closed else process.break_off())
            raise
        except GeneratorError as error:
            raise Unavailable(str(error)) from None

    async def _process_of(self, model: ServedModel) -> GeneratorProcess:
        """The current process if it has this model, else a new one."""
        if self._process is not None and self._process.runs and self._loaded_model == model:
            return self._process
        await self._unload()
        limits = self._limits
        load = Load(storage=model.storage, root=model.root, memory_bytes=limits.memory_bytes)
        process = await GeneratorProcess.start(load)
        try:
            async with asyncio.timeout(limits.load_timeout_s):
                await process.wait_until_loaded()
        except BaseException as error:
            await process.end()
            if isinstance(error, TimeoutError):
                raise Unavailable(f"loading the model exceeded its time limit of {limits.load_timeout_s:g} s") from None
            if isinstance(error, GeneratorError):
                raise Conflict(f"the model of {model.job_id} cannot be loaded: {error}") from None
            raise
        self._process, self._loaded_model = process, model
        log.info("loaded a model for generation", job=model.job_id, checkpoint=model.checkpoint, pid=process.pid)
        return process

    def _unload_soon(self) -> None:
        if self._turn.locked():
            return  # the holder of the turn schedules it again
        task = asyncio.create_task(self._unload_idle())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _unload_idle(self) -> None:
        async with self._turn:
            log.info("unloaded the idle model", idle_s=self._limits.idle_s)
            await self._unload()

    async def _unload(self) -> None:
        process, self._process, self._loaded_model = self._process, None, None
        if process is not None:
            await process.end()


def _busy(reason: str) -> Unavailable:
    return Unavailable(f"{reason}; try again later", headers={"retry-after": str(RETRY_AFTER_S)})
