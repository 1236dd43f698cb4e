"""Why a worker group died, on its way from Ray Train's controller to the driver."""

import pickle

from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback, WorkerHealthCheckFailedError

from service.run.notices import GroupNotices, read_notices


def test_a_lost_process_is_named_before_the_collectives_that_it_broke() -> None:
    notices = GroupNotices("job-aaaaaaaaaaaa-a1")
    broken = UserExceptionWithTraceback(RuntimeError("Connection closed by peer\nand more"), "a traceback")
    lost = WorkerHealthCheckFailedError("A worker health check failed.", RayActorError())
    notices.after_exception(None, {0: broken, 1: lost})
    notices.after_exception(None, {0: broken})
    assert read_notices("job-aaaaaaaaaaaa-a1") == [
        "rank 1 was lost: its process died",
        "rank 0 failed: RuntimeError: Connection closed by peer",
    ]


def test_notices_of_another_attempt_are_not_read() -> None:
    pickle.loads(pickle.dumps(GroupNotices("job-bbbbbbbbbbbb-a1"))).after_exception(
        None, {0: ValueError("x")}
    )
    assert read_notices("job-bbbbbbbbbbbb-a2") == []
    assert read_notices("job-bbbbbbbbbbbb-a1") == ["rank 0 failed: ValueError: x"]


def test_what_cannot_be_put_in_words_is_no_error() -> None:
    GroupNotices("job-cccccccccccc-a1").after_exception(None, {})
