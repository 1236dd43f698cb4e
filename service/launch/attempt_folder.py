"""The files of an attempt on the job's storage: what its driver is told, its groups, and how it ended."""

import os
import posixpath

from moe.plan import Plan
from moe.train.folder import Folder
from service.launch.launcher import Launch, Result

LAUNCH = "launch.json"
RESULT = "result.json"
PLAN = "plan.json"


class AttemptFolder:
    """The folder `attempts/<n>` of a job. Raises OSError when storage cannot be reached."""

    def __init__(self, url: str) -> None:
        self._folder = Folder(url)

    @classmethod
    def of(cls, launch_path: str) -> "AttemptFolder":
        """The folder that a `launch.json` lies in. Raises ValueError for another file's path."""
        folder, _, name = launch_path.rpartition("/")
        if name != LAUNCH or not folder:
            raise ValueError(f"the launch file (={launch_path!r}) must be the path or URL of a {LAUNCH}")
        return cls(folder)

    @property
    def url(self) -> str:
        return self._folder.url

    def launch(self) -> Launch:
        return Launch.model_validate_json(self._folder.read(LAUNCH))

    def write_launch(self, launch: Launch) -> str:
        """Puts `launch.json` there, readable by its owner only, for it holds a token. Returns its URL."""
        text = launch.model_dump_json(indent=1).encode()
        self._folder.make()
        if self._folder.is_local:
            path = self._folder.path_of(LAUNCH)
            draft = f"{path}.{os.getpid()}.tmp"
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
            self._folder.sync()
        else:
            self._folder.write_atomically(LAUNCH, text)
        return self._folder.url_of(LAUNCH)

    def write_result(self, result: Result) -> None:
        """Readers see all of it or nothing."""
        self._folder.make()
        self._folder.write_atomically(RESULT, result.model_dump_json(indent=1).encode())

    def settled_plan(self) -> Plan | None:
        """The plan that trials of this attempt have ended with."""
        try:
            return Plan.model_validate_json(self._folder.read(PLAN))
        except FileNotFoundError:
            return None

    def settle_plan(self, plan: Plan) -> None:
        self._folder.write_atomically(PLAN, plan.model_dump_json().encode())

    def begin_group(self, first: int) -> int:
        """The number of a new worker group: one more than any before, and at least `first`.

        One process of the group asks. Groups of an attempt follow each other, so that noting it is enough.
        """
        group = max([first - 1, *self.groups()]) + 1
        self._folder.make()
        self._folder.write_atomically(f"group-{group}", b"")
        return group

    def groups(self) -> list[int]:
        """The worker groups begun so far."""
        names = [posixpath.basename(name).removeprefix("group-") for name in self._folder.names()]
        return sorted(int(name) for name in names if name.isdigit())
