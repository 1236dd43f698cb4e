"""Why a worker group died, on its way from Ray Train's controller to the driver."""

from pathlib import Path

from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback, WorkerHealthCheckFailedError

from service.run.notices import GroupNotices, read_notices


def test_a_lost_process_is_named_before_the_collectives_that_it_broke(tmp_path: Path) -> None:
    notices = GroupNotices(str(tmp_path / "notices"))
    broken = UserExceptionWithTraceback(RuntimeError("Connection closed by peer\nand more"), "a traceback")
    lost = WorkerHealthCheckFailedError("A worker health check failed.", RayActorError())
    notices.after_exception(None, {0: broken, 1: lost})
    notices.after_exception(None, {0: broken})
    assert read_notices(tmp_path / "notices") == [
        "rank 1 was lost: its process died",
        "rank 0 failed: RuntimeError: Connection closed by peer",
    ]


def test_a_notice_is_written_where_the_folder_was_cleared_away(tmp_path: Path) -> None:
    path = tmp_path / "cleared" / "notices"
    GroupNotices(str(path)).after_exception(None, {0: ValueError("x")})
    assert read_notices(path) == ["rank 0 failed: ValueError: x"]


def test_a_notice_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "notices"
    GroupNotices(str(path)).after_exception(None, {0: ValueError("x")})
