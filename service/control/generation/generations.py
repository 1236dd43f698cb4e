"""Texts made by jobs' models: one model loaded and one text made at a time, in a process of its own."""

import asyncio
from dataclasses import dataclass

import structlog

from moe.spec.generation import GenerationSpec
from service.control.errors import Conflict, ServiceError, Unavailable
from service.generator.messages import GeneratorMessage, Load
from service.generator.process import GeneratorError, GeneratorProcess

MAX_WAITING = 8
"""Requests that wait for their turn."""
TURN_S = 60.0
"""Longest that one waits."""
RETRY_AFTER_S = 5
log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """A job's model as it is now."""

    job_id: str
    checkpoint: str
    """Name of the newest committed one: with another, the model is loaded anew."""
    storage: str
    root: str | None


@dataclass(frozen=True)
class GenerationLimits:
    timeout_s: float
    load_timeout_s: float
    idle_s: float
    memory_bytes: int | None = None


class Generation:
    """A text that is being generated."""

    def __init__(self) -> None:
        self.start_future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the prompt is taken, or with the error for which it is not."""
        self._messages: asyncio.Queue[GeneratorMessage | ServiceError] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._is_over = False
        """Whether nothing more is told."""

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
                error if isinstance(error, ServiceError) else Unavailable(f"the text broke off: {error}")
            )

    async def next(self, timeout_s: float) -> GeneratorMessage | None:
        """Next message, up to the `end`; None where none comes within so long. Raises ServiceError."""
        try:
            async with asyncio.timeout(timeout_s):
                message = await self._messages.get()
        except TimeoutError:
            return None
        if isinstance(message, ServiceError):
            raise message
        return message

    def leave(self) -> None:
        """Nobody reads it any more: it is broken off where it is still being made."""
        if self._task is not None and not self._is_over:
            self._task.cancel()


class Generations:
    """Belongs to one event loop. Requests take turns in the order in which they came; a job's model is loaded when its
    turn comes, in place of another's."""

    def __init__(self, limits: GenerationLimits) -> None:
        self._limits, self._turn, self._num_waiting = limits, asyncio.Lock(), 0
        self._process: GeneratorProcess | None = None
        self._loaded_model: ServedModel | None = None
        self._unloading: asyncio.TimerHandle | None = None
        self._tasks = set[asyncio.Task[None]]()
        self._is_closed = False

    async def begin(self, model: ServedModel, prompt: str, spec: GenerationSpec) -> Generation:
        """A text that is being made. Raises SpecError for what the model cannot be asked, Conflict where it cannot be
        loaded, and Unavailable: where others' turns come first for too long, or it takes more than it may."""
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
        """Ends the text that is being made, and the process."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._unload()

    async def _take_turn(self) -> None:
        if self._num_waiting >= MAX_WAITING:
            raise _busy("other texts are being made, and as many wait as may")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(TURN_S):
                await self._turn.acquire()
        except TimeoutError:
            raise _busy(f"other texts are being made, and have been for {TURN_S:g} s") from None
        finally:
            self._num_waiting -= 1
        if self._is_closed:
            self._turn.release()
            raise Unavailable("this service is stopping")

    def _release_turn(self, generation: Generation, task: asyncio.Task[None]) -> None:
        """The turn is given back, also by a task that was cancelled before it began."""
        self._tasks.discard(task)
        if not generation.start_future.done():
            generation.fail(self._cancellation_error())
        loop = asyncio.get_running_loop()
        self._unloading = loop.call_later(self._limits.idle_s, self._unload_soon)
        self._turn.release()

    def _cancellation_error(self) -> Unavailable:
        return Unavailable("this service is stopping" if self._is_closed else "nobody reads it")

    async def _make(
        self, generation: Generation, model: ServedModel, prompt: str, spec: GenerationSpec
    ) -> None:
        """Generate a text; the caller has the turn."""
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
            generation.fail(
                Unavailable(f"the text took longer than the {limit_s:g} s that one may take here")
            )
            await process.break_off()
        except asyncio.CancelledError:
            await (process.end() if self._is_closed else process.break_off())
            raise
        except GeneratorError as error:
            raise Unavailable(str(error)) from None

    async def _process_of(self, model: ServedModel) -> GeneratorProcess:
        """The process with this model: the one that is there, or a new one in its place."""
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
                raise Unavailable(
                    f"loading the model took longer than the {limits.load_timeout_s:g} s that it may take"
                ) from None
            if isinstance(error, GeneratorError):
                raise Conflict(f"the model of {model.job_id} cannot be loaded: {error}") from None
            raise
        self._process, self._loaded_model = process, model
        log.info(
            "loaded a model to generate with",
            job=model.job_id,
            checkpoint=model.checkpoint,
            pid=process.pid,
        )
        return process

    def _unload_soon(self) -> None:
        if self._turn.locked():
            return  # whoever has the turn asks again
        task = asyncio.create_task(self._unload_idle())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _unload_idle(self) -> None:
        async with self._turn:
            log.info("nothing was generated for a while: the model is unloaded", idle_s=self._limits.idle_s)
            await self._unload()

    async def _unload(self) -> None:
        process, self._process, self._loaded_model = self._process, None, None
        if process is not None:
            await process.end()


def _busy(words: str) -> Unavailable:
    return Unavailable(f"{words}; try again in a while", headers={"retry-after": str(RETRY_AFTER_S)})
