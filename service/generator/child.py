"""The generator process: `python -m service.generator.child`.

Reads `Order`s from standard input and writes messages to standard output; prints of libraries go to standard error.
Loads one model, and generates one text at a time.
"""

import os
import queue
import resource
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, TYPE_CHECKING

from moe.records import Ending
from moe.spec import SpecError
from moe.storage.folder import Folder
from moe.train.checkpoint import marker as markers
from service.generator.messages import GeneratorMessage, Load, Order, TextRequest

if TYPE_CHECKING:
    from moe.tasks.task import Generator


class _CannotLoad(Exception):
    """There is nothing to load; the message gives the reason."""


class _Orders:
    """Orders in sequence, read by a thread to see cancellations early."""

    def __init__(self, lines: IO[bytes]) -> None:
        self._lines, self._next = lines, queue.SimpleQueue[Order]()
        self._last_cancelled = -1
        threading.Thread(target=self._read, daemon=True).start()

    def next(self) -> Order:
        return self._next.get()

    def is_cancelled(self, number: int) -> bool:
        """Whether this text is cancelled, as are all earlier ones."""
        return number <= self._last_cancelled

    def _read(self) -> None:
        for line in self._lines:
            order = Order.model_validate_json(line)
            if order.break_off is not None:
                self._last_cancelled = order.break_off
            else:
                self._next.put(order)
        os._exit(0)


def main() -> None:
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(message: GeneratorMessage) -> None:
        output.write(message.model_dump_json(exclude_defaults=True) + "\n")
        output.flush()

    orders = _Orders(sys.stdin.buffer)
    load = orders.next().load
    assert load is not None, "the first order is to load"
    _limit(load)
    try:
        generator = _load(load)
        generator.prepare_for_decoding()
    except _CannotLoad as error:
        tell(GeneratorMessage(kind="failed", words=str(error)))
        return
    except BaseException as error:
        traceback.print_exc()
        tell(GeneratorMessage(kind="failed", words=_in_words(error, load)))
        return
    tell(GeneratorMessage(kind="loaded"))
    while True:
        request = orders.next().generate
        assert request is not None, "one loads once"
        try:
            for message in _generate(generator, request, orders):
                tell(message)
        except SpecError as error:
            problems = tuple(problem.to_dict() for problem in error.problems)
            tell(GeneratorMessage(kind="refused", number=request.number, problems=problems))
        except BrokenPipeError:
            return
        except Exception as error:
            traceback.print_exc()
            tell(GeneratorMessage(kind="failed", number=request.number, words=_in_words(error, load)))


def _limit(load: Load) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if load.memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (load.memory_bytes, load.memory_bytes))


def _load(load: Load) -> "Generator":
    """Model of the newest readable checkpoint. Raises _CannotLoad."""
    from moe.export.trained_model import TrainedModel
    from moe.train.checkpoint.checkpointer import CheckpointError

    storage = Folder.of_job(load.storage) if load.root is None else Folder(load.storage, root=load.root)
    checkpoints, faults = storage.subfolder(markers.FOLDER), list[str]()
    for name in markers.list_committed(checkpoints):
        try:
            return TrainedModel.from_checkpoint(checkpoints, name).generator
        except CheckpointError as error:
            faults.append(str(error))
    raise _CannotLoad(faults[0] if faults else f"there is no committed checkpoint under {checkpoints.url} yet")


def _generate(generator: "Generator", request: TextRequest, orders: _Orders) -> Iterator[GeneratorMessage]:
    """Messages of one text. Raises SpecError for an unsupported request."""
    spec, notes = generator.with_model_settings(request.spec)
    stream, number = generator.stream(request.prompt, spec), request.number
    yield GeneratorMessage(kind="begun", number=number)
    num_pieces = 0
    while not orders.is_cancelled(number):
        try:
            piece = next(stream)
        except StopIteration as stop:
            ending: Ending = replace(stop.value, notes=notes or None)
            yield GeneratorMessage(kind="end", number=number, **ending.to_plain())
            return
        num_pieces += 1
        if piece:
            yield GeneratorMessage(kind="text", number=number, text=piece)
    yield GeneratorMessage(kind="end", number=number, reason="cancelled", num_tokens=num_pieces)


def _in_words(error: BaseException, load: Load) -> str:
    lines = str(error).strip().splitlines()
    words = f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
    if load.memory_bytes is not None and (isinstance(error, MemoryError) or "can't allocate memory" in str(error)):
        return (
            f"generation needs more memory than allowed (={load.memory_bytes:,} bytes); request "
            "fewer tokens, or ask the operator to raise SHARDYARD_GENERATION_MEMORY_BYTES"
        )
    return words


if __name__ == "__main__":
    main()
