"""Restores files of an attempt on storage: its launch and the marks of its worker groups. If they are removed while
the job runs, new worker groups cannot read the launch, and reuse group numbers whose records the control plane
already has."""

import logging

from service.wire.attempt_folder import AttemptFolder

_log = logging.getLogger("service.run.driver")


class AttemptKeeper:
    """Remembers an attempt's files, and writes missing ones again."""

    def __init__(self, launch_path: str) -> None:
        """Raises as `AttemptFolder.open_launch` does."""
        self._folder, _ = AttemptFolder.open_launch(launch_path)
        self._name = launch_path.rpartition("/")[2]
        self._content = self._folder.read_launch(self._name)
        self._groups: set[int] = set()

    def look(self) -> bool:
        """Check the files once; True if missing ones were written again. Raises OSError."""
        groups, has_launch = set(self._folder.groups()), self._folder.has(self._name)
        missing_groups = self._groups - groups
        self._groups |= groups
        if has_launch and not missing_groups:
            return False
        self._folder.restore(self._name, self._content, sorted(missing_groups))
        _log.warning(
            "files of this attempt were removed from %s; rewriting them. Removed checkpoints, "
"records and logs are lost", self._folder.url,
        )  # fmt: skip
        return True
