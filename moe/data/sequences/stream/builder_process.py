"""The background process that writes windows, from the side of the process that trains."""

import base64
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import moe
from moe.data.sequences.stream.builder import WindowBuilder
from moe.data.sequences.stream.order import WindowPosition
from moe.data.sequences.stream.plan import StreamPlan
from moe.spec import Problem, SpecError

_SOURCE_FOLDER = str(Path(moe.__file__).resolve().parents[1])
_MAX_MESSAGE_BYTES = 2000


class BuilderProcess(WindowBuilder):
    """Process of its own that writes windows. It has this one's environment, and so its credentials for stores."""

    def __init__(self, plan: StreamPlan, prepared: Path, roots: Sequence[str] | None, num_threads: int) -> None:
        """`prepared`: the prepared folder, with the tokenizer. `num_threads`: threads that tokenize."""
        paths = [_SOURCE_FOLDER, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(paths), "RAYON_NUM_THREADS": str(num_threads),
            "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true",
        }  # fmt: skip
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        command = [sys.executable, "-P", "-m", "moe.data.sequences.stream.builder"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment
        )
        self._answers: dict[int, dict[str, Any]] = {}
        self._send({
            "plan": plan.to_plain(), "shards": base64.b64encode(plan.shards.to_bytes()).decode(),
            "prepared": str(prepared), "roots": None if roots is None else list(roots),
        })  # fmt: skip

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def request(self, partition: int, start: WindowPosition, folder: Path) -> None:
        self._send({"partition": partition, "start": start, "folder": str(folder)})

    def wait(self, partition: int) -> WindowPosition:
        while partition not in self._answers:
            answer = json.loads(self._pipe(self._process.stdout).readline() or b"null")
            if answer is None:
                raise self._ended()
            self._answers[answer["partition"]] = answer
        answer = self._answers.pop(partition)
        if "problems" in answer:
            raise SpecError([Problem(**problem) for problem in answer["problems"]])
        return WindowPosition.of_plain(answer["next"])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            try:
                self._pipe(pipe).close()
            except BrokenPipeError:  # of what was not sent
                continue

    def _send(self, request: dict[str, Any]) -> None:
        pipe = self._pipe(self._process.stdin)
        try:
            pipe.write(json.dumps(request).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _ended(self) -> RuntimeError:
        code = self._process.wait()
        self._errors.seek(max(0, self._errors.seek(0, 2) - _MAX_MESSAGE_BYTES))
        message = self._errors.read().decode(errors="replace").strip()
        return RuntimeError(f"the process that reads the stream ended ({code}){': ' if message else ''}{message}")

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe
