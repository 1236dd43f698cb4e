"""The files of an attempt on the job's storage: what its driver is told, its groups, and how it ended."""

import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress

from pydantic import ValidationError

from moe.plan import Plan
from moe.storage.folder import Folder
from service.wire.launch import Launch, Result

_LAUNCH = re.compile(
    r"(?P<storage>.+)/attempts/(?P<attempt>[1-9][0-9]*)/launch\.(?P<sha256>[0-9a-f]{64})\.json"
)
"""A launch is named by its content: runs may write where it lies, and a driver is told which one is its own."""
_NAME = re.compile(r"launch\.(?P<sha256>[0-9a-f]{64})\.json")
MAX_LAUNCH_BYTES = 1 << 26
RESULT = "result.json"
PLAN = "plan.json"


def launch_prefix(storage: str, attempt: int) -> str:
    """Prefix of the paths of an attempt's launch files."""
    return f"{storage}/attempts/{attempt}/launch."


class AttemptFolder:
    """The folder `attempts/<n>` of a job. Raises OSError when storage cannot be reached."""

    def __init__(self, storage: str, attempt: int) -> None:
        self._folder = Folder.of_job(storage).below(f"attempts/{attempt}")

    @classmethod
    def open_launch(cls, launch_path: str) -> "tuple[AttemptFolder, Launch]":
        """The folder that a launch lies in, and the launch. Raises ValueError for another file's path, and for one that
        was altered since it was written."""
        if (match := _LAUNCH.fullmatch(launch_path)) is None:
            raise ValueError(f"the launch file (={launch_path!r}) must be what 'write_launch' has named")
        folder = cls(match["storage"], int(match["attempt"]))
        content = folder._folder.read(launch_path.rpartition("/")[2])
        if hashlib.sha256(content).hexdigest() != match["sha256"]:
            raise ValueError(f"{launch_path} was altered since it was written; nothing of it is done")
        return folder, Launch.model_validate_json(content)

    @property
    def url(self) -> str:
        return self._folder.url

    def write_launch(self, launch: Launch) -> str:
        """Puts `launch.<its SHA-256>.json` there, readable by its owner only, for it holds a token. Returns its URL."""
        content = launch.model_dump_json(indent=1).encode()
        name = f"launch.{hashlib.sha256(content).hexdigest()}.json"
        self._folder.write(name, content, mode=0o600)
        return self._folder.url_of(name)

    def read_launch(self, name: str) -> bytes:
        """Content of a launch's file."""
        return self._folder.read(name, max_bytes=MAX_LAUNCH_BYTES)

    def has(self, name: str) -> bool:
        """Whether a file of this name lies in the folder."""
        return name in self._folder.names()

    def restore(self, name: str, content: bytes, groups: Sequence[int]) -> None:
        """Write a launch and the marks of worker groups again."""
        self._folder.write(name, content, mode=0o600)
        for group in groups:
            self._folder.write(f"group-{group}", b"")

    def launches(self) -> list[Launch]:
        """The launches of this attempt that are whole, and that this release can read."""
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
        """Readers see all of it or nothing."""
        self._folder.write(RESULT, result.model_dump_json(indent=1).encode())

    def chosen_plan(self) -> Plan | None:
        """The plan that trials of this attempt have ended with."""
        try:
            return Plan.model_validate_json(self._folder.read(PLAN))
        except FileNotFoundError:
            return None

    def keep_chosen_plan(self, plan: Plan) -> None:
        self._folder.write(PLAN, plan.model_dump_json().encode())

    def begin_group(self, first: int) -> int:
        """The number of a new worker group: one more than any before, and at least `first`.

        One process of the group asks. Groups of an attempt follow each other, so that noting it is enough.
        """
        group = max([first - 1, *self.groups()]) + 1
        self._folder.write(f"group-{group}", b"")
        return group

    def groups(self) -> list[int]:
        """The worker groups begun so far."""
        names = [name.removeprefix("group-") for name in self._folder.names()]
        return sorted(int(name) for name in names if name.isdigit())
