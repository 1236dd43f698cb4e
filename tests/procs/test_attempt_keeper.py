"""An attempt's files survive the removal of its job's storage while its driver lives."""

import shutil
from pathlib import Path

from service.run.attempt_keeper import AttemptKeeper
from service.wire.attempt_folder import AttemptFolder
from tests.procs.launching import launch


def test_a_launch_and_the_numbers_of_groups_outlive_the_folder(tmp_path: Path) -> None:
    given = launch(tmp_path)
    folder = AttemptFolder(given.storage, given.attempt)
    path = folder.write_launch(given)
    keeper = AttemptKeeper(path)
    assert [folder.begin_group(0), folder.begin_group(0)] == [0, 1]
    assert not keeper.look()
    shutil.rmtree(given.storage)
    assert keeper.look()
    assert not keeper.look()
    assert AttemptFolder.open_launch(path)[1] == given, "a new worker group reads it"
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert folder.begin_group(0) == 2, "and no group has the number of another"
