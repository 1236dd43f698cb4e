"""POSTs that fail, overlap or come twice: one job and one answer for a key, no folder of a job that is not stored."""

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.spec import JobSpec, SpecError
from service.control.api.services import Services
from service.control.errors import Conflict, Unavailable
from service.control.jobs.roots import StorageRoots
from service.control.retention.draft_folder import DraftFolder
from service.control.retention.drafts import Drafts
from service.control.scheduling.keyed_lock import MAX_WAITING, KeyedLock
from service.control.store.database import Database
from service.control.store.drafts import Draft, all_drafts, finish_draft, insert_draft
from service.control.store.job_lists import list_jobs
from service.control.store.jobs import JobRow
from service.wire.states import State
from tests.processes import await_that
from tests.refusals import expect_problem
from tests.service.checkpoints import commit
from tests.service.control_plane import spec
from tests.service.controllers import controller_on, submit_job


def test_a_commit_whose_answer_was_lost_costs_no_job_its_folder(services: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`write` is patched: the transaction is committed, and then the call fails."""
    write, writes = services.database.write, []

    @contextmanager
    def lossy() -> Iterator[Any]:
        writes.append(1)
        with write() as tx:
            yield tx
        if len(writes) == 2:  # after the one that notes the folder
            raise Unavailable("the connection broke")

    monkeypatch.setattr(services.database, "write", lossy)
    with pytest.raises(Unavailable):
        submit_job(services, key="key")
    job, is_new = services.requests.submit(JobSpec.parse(spec()), "tester", "key")
    assert not is_new
    assert (Path(job.storage) / "spec.json").is_file()


def test_a_job_whose_folder_the_sweep_has_taken_is_not_stored(services: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(storage: str, *_: Any) -> None:
        with services.database.write() as tx:
            finish_draft(tx, Path(storage).name)

    monkeypatch.setattr(services.requests.new_jobs, "_put_spec", slow)
    with pytest.raises(Unavailable, match="repeat the request"):
        submit_job(services)


@pytest.mark.sample(2)
@pytest.mark.parametrize("was_there", [(), ("team",), ("team", "a")])
@pytest.mark.parametrize("moment", ["before it was written", "after"])
def test_a_post_that_fails_leaves_of_the_folders_above_its_own_those_that_were_there(
    services: Any, monkeypatch: pytest.MonkeyPatch, was_there: tuple[str, ...], moment: str
) -> None:
    root = Path(services.settings.storage_roots[0])
    root.joinpath(*was_there).mkdir(parents=True)
    before = set(root.rglob("*"))
    changes: dict[str, Any] = {"storage": str(root / "team/a")}
    if moment == "after":
        write = services.database.write

        @contextmanager
        def failing_write() -> Iterator[Any]:
            """Fails in the transaction that stores the job."""
            with write() as tx:
                if list(root.rglob("spec.json")):
                    raise Unavailable("the connection broke")
                yield tx

        monkeypatch.setattr(services.database, "write", failing_write)
    else:
        changes["start_from"] = {"job": "job-aaaaaaaaaaaa"}
    with pytest.raises((Unavailable, SpecError)):
        submit_job(services, **changes)
    assert set(root.rglob("*")) == before


@pytest.mark.parametrize("subfolder", ["new/" + "x" * 300, "new/" * 30 + "x" * 300, "file/new"])
def test_a_folder_that_can_never_be_made_leaves_nothing_and_no_note(services: Any, subfolder: str) -> None:
    root = Path(services.settings.storage_roots[0])
    root.mkdir(parents=True, exist_ok=True)
    (root / "file").touch()
    before = set(root.rglob("*"))
    with expect_problem("not_writable", "storage"):
        submit_job(services, storage=str(root / subfolder))
    assert set(root.rglob("*")) == before
    with services.database.read() as tx:
        assert all_drafts(tx) == []


@pytest.mark.parametrize("visits", [1, 9])
def test_posts_that_come_and_go_while_another_looks_leave_no_folder_to_it(
    services: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visits: int
) -> None:
    """One post finds its parent folder made by another, which has removed it and its note when the first notes that:
    at its first looks, or at each."""
    root, lexists = tmp_path / "root", os.path.lexists
    root.mkdir()
    roots = StorageRoots([str(root)])

    def draft(job_id: str) -> DraftFolder:
        return DraftFolder(services.database, roots, job_id, f"{root}/new/{job_id}")

    def make(folder: DraftFolder, job_id: str) -> None:
        roots.folder(f"{root}/new/{job_id}").make()
        folder.mark_created()

    num_visits = 0

    def look(path: str) -> bool:
        nonlocal num_visits
        num_visits += 1
        monkeypatch.setattr(os.path, "lexists", lexists)
        first = draft(f"job-a{num_visits}")
        first.note(1)
        make(first, f"job-a{num_visits}")
        exists = lexists(path)
        first.give_up()
        if num_visits < visits:
            monkeypatch.setattr(os.path, "lexists", look)
        return exists

    second = draft("job-b")
    monkeypatch.setattr(os.path, "lexists", look)
    second.note(1)
    monkeypatch.setattr(os.path, "lexists", lexists)
    assert num_visits
    make(second, "job-b")
    second.give_up()
    assert [*root.iterdir()] == []


def sweep(database: Database, root: Path) -> list[Draft]:
    """Run the sweep to its end; return the drafts still noted."""
    drafts = Drafts(database, StorageRoots([str(root)]), abandoned_after_s=1.0)
    while drafts.step():
        pass
    with database.read() as tx:
        return all_drafts(tx)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path_factory.mktemp('state') / 'shardyard.db'}")
    database.migrate()
    yield database
    database.close()


STEPS = ("note", "make", "end")
ENDS = ("refused", "refused before it is made", "killed", "stored")
PLACES = ("", "a", "a/b", "a/b/c", "there", "there/a")


@given(
    st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(ENDS)), min_size=1, max_size=3).flatmap(
        lambda posts: st.tuples(
            st.just(posts), st.permutations([number for number in range(len(posts)) for _ in STEPS])
        )
    )
)
def test_however_posts_overlap_nothing_is_left_but_what_is_stored(
    database: Database, tmp_path_factory: pytest.TempPathFactory, case: tuple[list[tuple[str, str]], list[int]]
) -> None:
    """Each post notes its folder, makes it and ends; the sweep finds those that were killed."""
    posts, order = case
    root = tmp_path_factory.mktemp("root")
    (root / "there").mkdir()
    roots = StorageRoots([str(root)])
    expected = {root / "there"}
    folders, steps = {}, {number: iter(STEPS) for number in range(len(posts))}
    for number in order:
        place, end = posts[number]
        job_id = f"job-{number}"
        storage = str(root / place / job_id)
        match next(steps[number]):
            case "note":
                folders[number] = DraftFolder(database, roots, job_id, storage)
                folders[number].note(1)
            case "make" if end != "refused before it is made":
                roots.folder(storage).write("spec.json", b"{}")
                folders[number].mark_created()
            case "end" if end == "stored":
                with database.write() as tx:
                    assert finish_draft(tx, job_id)
                expected |= {Path(storage), Path(storage) / "spec.json"}
                expected |= {path for path in Path(storage).parents if root in path.parents}
            case "end" if end.startswith("refused"):
                folders[number].give_up()
    assert sweep(database, root) == []
    assert set(root.rglob("*")) == expected


def test_a_note_of_a_folder_that_cannot_be_made_or_removed_holds_up_no_other(services: Any, tmp_path: Path) -> None:
    root, database = tmp_path / "root", services.database
    (root / "job-b").mkdir(parents=True)
    (root / "file").touch()
    stays = Draft("job-a", str(tmp_path / "no-root-any-more" / "job-a"), 0)
    with database.write() as tx:
        insert_draft(tx, stays, 1)
        for job_id, subfolder in (("job-b", "job-b"), ("job-c", "file/job"), ("job-d", "x" * 300 + "/job")):
            insert_draft(tx, Draft(job_id, str(root / subfolder), 0), 2)
    assert sweep(database, root) == [stays]
    assert not (root / "job-b").exists()


class Posts:
    """Jobs that start from another one's checkpoint, of three blocks; `while_copying` is called in each, in order."""

    def __init__(self, folder: Path) -> None:
        self.services: Services = controller_on(folder)
        self.source = submit_job(self.services)
        commit(self.source.storage, 2, spec=JobSpec.parse(spec()).model_dump(mode="json"))
        self.while_copying: list[Callable[[], object]] = []
        self.services.requests._warm_starts._should_stop = self._at_block

    def _at_block(self) -> bool:
        if self.while_copying:
            self.while_copying.pop(0)()
        return False

    def post(self, **changes: object) -> tuple[JobRow, bool]:
        fields = {"train": {"num_steps": 9, "batch_tokens": 1024}, "start_from": {"job": self.source.id}, **changes}
        return self.services.requests.submit(JobSpec.parse(spec(**fields)), "tester", "key")

    def repeat(self, client: ThreadPoolExecutor) -> "Future[tuple[JobRow, bool]]":
        """The same post by another thread, which waits for the first."""
        repeat = client.submit(self.post)
        await_that(lambda: self.services.requests._key_locks.num_waiting == 1 or repeat.done())
        return repeat

    def num_jobs(self) -> int:
        with self.services.database.read() as tx:
            return len(list_jobs(tx, limit=100)[0])


@pytest.fixture
def posts(tmp_path: Path) -> Iterator[Posts]:
    posts = Posts(tmp_path)
    yield posts
    posts.services.database.close()


@pytest.fixture
def client() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield pool


def test_a_repeat_has_the_first_answer_when_the_source_is_gone(posts: Posts, client: ThreadPoolExecutor) -> None:
    repeats = []

    def repeat() -> None:
        repeats.append(posts.repeat(client))
        shutil.rmtree(posts.source.storage)

    posts.while_copying = [lambda: None, lambda: None, repeat]
    first, is_new = posts.post()
    (repeat_job, is_new_again) = repeats[0].result()
    assert (is_new, is_new_again, repeat_job.id, posts.num_jobs()) == (True, False, first.id, 2)
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
        repeats.append(posts.repeat(client))
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
    turns, keys = KeyedLock(), []

    def enter(key: tuple[str, str]) -> None:
        with turns.acquire(key):
            keys.append(key)

    with ThreadPoolExecutor(max_workers=MAX_WAITING) as pool:
        with turns.acquire(("me", "key")):
            futures = [pool.submit(enter, ("me", "key")) for _ in range(MAX_WAITING)]
            await_that(lambda: turns.num_waiting == MAX_WAITING)
            with (
                pytest.raises(Unavailable, match="repeat it later with the same key") as error,
                turns.acquire(("me", "key")),
            ):
                pass
            assert error.value.headers == {"retry-after": "10"}
            enter(("you", "key"))
            assert keys == [("you", "key")]
        for future in futures:
            future.result()
    assert (len(keys), turns.num_waiting) == (1 + MAX_WAITING, 0)
