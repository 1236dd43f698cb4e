"""POSTs that come twice under one key, as a client's repeat after a lost answer does: one job, one answer."""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moe.spec import JobSpec
from service.control.api.services import Services
from service.control.errors import Conflict, Unavailable
from service.control.scheduling.keyed_lock import MAX_WAITING, KeyedLock
from service.control.store.jobs import JobRow, list_jobs
from service.wire.states import State
from tests.processes import await_that
from tests.service.checkpoints import commit
from tests.service.control_plane import NODE, spec
from tests.service.local_launcher import LocalLauncher
from tests.service.test_crashes import controller_on


class Posts:
    """Jobs that start from another one's checkpoint, of three blocks; `while_copying` is called in each, in order."""

    def __init__(self, folder: Path) -> None:
        cluster = LocalLauncher(folder / "cluster")
        cluster.set_nodes(NODE)
        self.services: Services = controller_on(folder, cluster)
        self.source = self.services.requests.submit(JobSpec.parse(spec()), "me")[0]
        commit(self.source.storage, 2, spec=JobSpec.parse(spec()).model_dump(mode="json"))
        self.while_copying: list[Callable[[], object]] = []
        self.services.requests._warm_starts._should_stop = self._at_block

    def _at_block(self) -> bool:
        if self.while_copying:
            self.while_copying.pop(0)()
        return False

    def post(self, **changes: object) -> tuple[JobRow, bool]:
        given = {"train": {"num_steps": 9, "batch_tokens": 1024}, "start_from": {"job": self.source.id}, **changes}
        return self.services.requests.submit(JobSpec.parse(spec(**given)), "me", "key")

    def num_jobs(self) -> int:
        with self.services.database.read() as tx:
            return len(list_jobs(tx, limit=100))


@pytest.fixture
def posts(tmp_path: Path) -> Iterator[Posts]:
    posts = Posts(tmp_path)
    yield posts
    posts.services.database.close()


@pytest.fixture
def client() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield pool


def test_a_repeat_has_the_answer_of_the_first_also_when_the_source_is_gone(
    posts: Posts, client: ThreadPoolExecutor
) -> None:
    repeats = []

    def repeat() -> None:
        repeats.append(client.submit(posts.post))
        await_that(lambda: posts.services.requests._turns.num_waiting == 1 or repeats[0].done())
        shutil.rmtree(posts.source.storage)

    posts.while_copying = [lambda: None, lambda: None, repeat]
    first, is_new = posts.post()
    (again, is_new_again) = repeats[0].result()
    assert (is_new, is_new_again, again.id, posts.num_jobs()) == (True, False, first.id, 2)
    assert posts.post()[0].id == first.id


def test_a_repeat_with_another_spec_is_a_conflict(posts: Posts, client: ThreadPoolExecutor) -> None:
    repeats = []
    posts.while_copying = [lambda: repeats.append(client.submit(posts.post, name="other"))]
    first, _ = posts.post()
    with pytest.raises(Conflict, match=f"this Idempotency-Key belongs to {first.id}, which has another spec"):
        repeats[0].result()


def test_a_repeat_of_what_failed_is_tried_itself(posts: Posts, client: ThreadPoolExecutor) -> None:
    repeats = []

    def repeat_and_fail() -> None:
        repeats.append(client.submit(posts.post))
        await_that(lambda: posts.services.requests._turns.num_waiting == 1 or repeats[0].done())
        raise OSError("a moment's fault")

    posts.while_copying = [repeat_and_fail]
    with pytest.raises(Unavailable, match="a moment's fault"):
        posts.post()
    job, is_new = repeats[0].result()
    assert (is_new, job.state, posts.num_jobs()) == (True, State.QUEUED, 2)


def test_many_posts_of_one_key_at_once_make_one_job(posts: Posts) -> None:
    with ThreadPoolExecutor(max_workers=12) as pool:
        answers = list(pool.map(lambda _: posts.post(start_from=None), range(12)))
    assert len({job.id for job, _ in answers}) == 1
    assert [is_new for _, is_new in answers].count(True) == 1


def test_a_few_wait_and_no_more() -> None:
    turns, entered = KeyedLock(), []

    def enter(key: tuple[str, str]) -> None:
        with turns.acquire(key):
            entered.append(key)

    with ThreadPoolExecutor(max_workers=MAX_WAITING) as pool:
        with turns.acquire(("me", "key")):
            waiting = [pool.submit(enter, ("me", "key")) for _ in range(MAX_WAITING)]
            await_that(lambda: turns.num_waiting == MAX_WAITING)
            with (
                pytest.raises(Unavailable, match="repeat it later with the same key") as refused,
                turns.acquire(("me", "key")),
            ):
                pass
            assert refused.value.headers == {"retry-after": "10"}
            enter(("you", "key"))
            assert entered == [("you", "key")]
        for each in waiting:
            each.result()
    assert (len(entered), turns.num_waiting) == (1 + MAX_WAITING, 0)
