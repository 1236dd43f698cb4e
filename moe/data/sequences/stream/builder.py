"""Writers of windows: the contract, and the process that does it in the background,
`python -m moe.data.sequences.stream.builder`, which `builder_process` starts.

The process ends when its standard input does, so also when the process that started it is killed.
"""

import base64
import json
import os
import queue
import sys
import threading
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import Any

from moe.data import preparation
from moe.data.conversations.template import ChatTemplate
from moe.data.sequences.model_tokenizer import ModelTokenizer, load_tokenizer
from moe.data.sequences.stream.order import WindowPosition
from moe.data.sequences.stream.plan import StreamPlan
from moe.data.sequences.stream.window import PartitionReader
from moe.spec import ChatSpec, SpecError, StreamableSpec


class WindowBuilder(ABC):
    """Writes windows in the order in which they are requested."""

    @abstractmethod
    def request(self, partition: int, start: WindowPosition, folder: Path) -> None:
        """Have the window of a partition that begins at `start` written to the new `folder`."""

    @abstractmethod
    def wait(self, partition: int) -> WindowPosition:
        """Wait for the requested window of a partition; return where the next one begins. Raises SpecError for faults
        of the user's files."""

    @abstractmethod
    def close(self) -> None:
        """End what runs in the background."""


def prepared_template(data: StreamableSpec, prepared: Path) -> ChatTemplate | None:
    """Chat template of a prepared folder; None if there are no conversations."""
    if not isinstance(data, ChatSpec):
        return None
    names = preparation.tokenizer_names(prepared)
    files = ModelTokenizer.of_files({name: preparation.read_tokenizer(prepared, name) for name in names})
    return ChatTemplate.of_files(files.files, data.date, files.end_texts())


def _main() -> None:
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(lines,), daemon=True).start()
    stream = json.loads(lines.get())
    readers: dict[int, PartitionReader] = {}
    plan = None
    while True:
        request = json.loads(lines.get())
        partition = request["partition"]
        try:
            if plan is None:
                plan = StreamPlan.of_plain(stream["plan"], base64.b64decode(stream["shards"]), stream["roots"])
                prepared = Path(stream["prepared"])
                tokenizer = load_tokenizer(partial(preparation.read_tokenizer, prepared))
                template = prepared_template(plan.data, prepared)
            if partition not in readers:
                readers[partition] = PartitionReader(plan, partition, tokenizer, template)
            start = WindowPosition.of_plain(request["start"])
            answer: dict[str, Any] = {"next": readers[partition].write_window(start, Path(request["folder"]))}
        except SpecError as error:
            answer = {"problems": [problem.to_dict() for problem in error.problems]}
        sys.stdout.write(json.dumps({"partition": partition, **answer}, default=str) + "\n")
        sys.stdout.flush()


def _receive(lines: "queue.SimpleQueue[bytes]") -> None:
    """Pass on the lines of standard input; end the process with them, whatever it is doing."""
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    _main()
