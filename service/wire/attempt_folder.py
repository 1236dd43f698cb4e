"""Files of an attempt on the job's storage: its launch, worker groups and result."""

import hashlib
import os
import re
import socket
from collections.abc import Sequence
from contextlib import suppress

from pydantic import ValidationError

from moe.plan import Plan
from moe.storage.folder import Folder
from service.wire.launch import Launch, Result

_LAUNCH = re.compile(r"(?P<storage>.+)/attempts/(?P<attempt>[1-9][0-9]*)/launch\.(?P<sha256>[0-9a-f]{64})\.json")
"""Launch names contain their SHA-256, since runs can write to the folder."""
_NAME = re.compile(r"launch\.(?P<sha256>[0-9a-f]{64})\.json")
_GROUP = re.compile(r"group-(?P<number>[0-9]+)")
MAX_LAUNCH_BYTES = 1 << 26
DRIVER = "driver"
"""Claim of the attempt's driver."""
RESULT = "result.json"
PLAN = "plan.json"


def launch_prefix(storage: str, attempt: int) -> str:
    """Path prefix of an attempt's launch files."""
    return f"{storage}/attempts/{attempt}/launch."


class AttemptFolder:
    """Folder `attempts/<n>` of a job. Raises OSError when storage cannot be reached."""

    def __init__(self, storage: str, attempt: int) -> None:
        self._folder = Folder.of_job(storage).subfolder(f"attempts/{attempt}")

    @classmethod
    def open_launch(cls, launch_path: str) -> "tuple[AttemptFolder, Launch]":
        """(folder of a launch, launch). Raises ValueError for another file or a launch altered since it was written."""
        if (match := _LAUNCH.fullmatch(launch_path)) is None:
            raise ValueError(f"the launch file (={launch_path!r}) must be named as write_launch names it")
        folder = cls(match["storage"], int(match["attempt"]))
        content = folder._folder.read(launch_path.rpartition("/")[2])
        if hashlib.sha256(content).hexdigest() != match["sha256"]:
            raise ValueError(f"{launch_path} was modified after it was written; refusing to run it")
        return folder, Launch.model_validate_json(content)

    @property
    def url(self) -> str:
        return self._folder.url

    def write_launch(self, launch: Launch) -> str:
        """Write `launch.<its SHA-256>.json`, readable by its owner only (it holds a token); returns its URL."""
        content = launch.model_dump_json(indent=1).encode()
        name = f"launch.{hashlib.sha256(content).hexdigest()}.json"
        self._folder.write(name, content, mode=0o600)
        return self._folder.url_of(name)

    def read_launch(self, name: str) -> bytes:
        """Content of a launch file."""
        return self._folder.read(name, max_bytes=MAX_LAUNCH_BYTES)

    def has(self, name: str) -> bool:
        """Whether the folder has a file of this name."""
        return name in self._folder.names()

    def claim_driver(self) -> bool:
        """Whether this process is the attempt's first driver: KubeRay starts another when a Ray head is replaced, and
        Kueue when it admits a preempted job again. Raises OSError."""
        return self._folder.claim(DRIVER, f"{socket.gethostname()} {os.getpid()}\n".encode())

    def restore(self, name: str, content: bytes, groups: Sequence[int]) -> None:
        """Write a launch and the marks of worker groups again."""
        self._folder.write(name, content, mode=0o600)
        for group in groups:
            self._folder.write(f"group-{group}", b"")

    def launches(self) -> list[Launch]:
        """Intact launches of this attempt that this release can read."""
        launches = []
        for name in self._folder.names():
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            content = self._folder.read(name, max_bytes=MAX_LAUNCH_BYTES)
            if hashlib.sha256(content).hexdigest() == match["sha256"]:
                with suppress(ValidationError):
                    launches.append(Launch.model_validate_json(content))
        return launches

    def write_result(self, result: Result) -> None:
        """Write the result atomically."""
        self._folder.write(RESULT, result.model_dump_json(indent=1).encode())

    def chosen_plan(self) -> Plan | None:
        """The plan that this attempt's trials chose; None before they have."""
        try:
            return Plan.model_validate_json(self._folder.read(PLAN))
        except FileNotFoundError:
            return None

    def write_chosen_plan(self, plan: Plan) -> None:
        self._folder.write(PLAN, plan.model_dump_json().encode())

    def begin_group(self, first: int) -> int:
        """Number of a new worker group: at least `first`, above any before. Called by one process per group; groups
        never overlap, so that no lock is needed."""
        group = max([first - 1, *self.groups()]) + 1
        self._folder.write(f"group-{group}", b"")
        return group

    def groups(self) -> list[int]:
        """Numbers of the worker groups begun so far."""
        marks = [_GROUP.fullmatch(name) for name in self._folder.names()]
        return sorted(int(mark["number"]) for mark in marks if mark)
