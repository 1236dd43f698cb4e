"""Folders of jobs that are not stored: removed, one way or another; and never that of one that is."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.spec import JobSpec, SpecError
from service.control.errors import Unavailable
from service.control.jobs.roots import StorageRoots
from service.control.retention.draft_folder import DraftFolder
from service.control.retention.drafts import Drafts
from service.control.store.database import Database
from service.control.store.drafts import Draft, all_drafts, finish_draft, insert_draft, oldest_draft
from tests.refusals import refused
from tests.service.control_plane import NODE, spec
from tests.service.local_launcher import LocalLauncher
from tests.service.test_crashes import controller_on


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Any]:
    cluster = LocalLauncher(tmp_path / "cluster")
    cluster.set_nodes(NODE)
    services = controller_on(tmp_path, cluster)
    yield services
    services.database.close()


def test_a_commit_whose_answer_was_lost_costs_no_job_its_folder(services: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No database here loses its answers when asked to: the transaction goes through, and then it fails."""
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
        services.requests.submit(JobSpec.parse(spec()), "me", "key")
    job, is_new = services.requests.submit(JobSpec.parse(spec()), "me", "key")
    assert not is_new
    assert (Path(job.storage) / "spec.json").is_file()


def test_a_job_whose_folder_the_sweep_has_taken_is_not_stored(services: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(storage: str, *_: Any) -> None:
        with services.database.write() as tx:
            finish_draft(tx, Path(storage).name)

    monkeypatch.setattr(services.requests, "_put_spec", slow)
    with pytest.raises(Unavailable, match="repeat the request"):
        services.requests.submit(JobSpec.parse(spec()), "me", None)


@pytest.mark.parametrize("was_there", [(), ("team",), ("team", "a")])
@pytest.mark.parametrize("refused", ["before it was written", "after"])
def test_a_post_that_fails_leaves_of_the_folders_above_its_own_those_that_were_there(
    services: Any, monkeypatch: pytest.MonkeyPatch, was_there: tuple[str, ...], refused: str
) -> None:
    root = Path(services.settings.storage_roots[0])
    root.joinpath(*was_there).mkdir(parents=True)
    before = set(root.rglob("*"))
    given = spec(storage=str(root / "team/a"))
    if refused == "after":
        write = services.database.write

        @contextmanager
        def refusing() -> Iterator[Any]:
            """No database here is away when asked to be: in the transaction of a submission that stores it."""
            with write() as tx:
                if list(root.rglob("spec.json")):
                    raise Unavailable("the connection broke")
                yield tx

        monkeypatch.setattr(services.database, "write", refusing)
    else:
        given["start_from"] = {"job": "job-aaaaaaaaaaaa"}
    with pytest.raises((Unavailable, SpecError)):
        services.requests.submit(JobSpec.parse(given), "me", None)
    assert set(root.rglob("*")) == before


@pytest.mark.parametrize("below", ["new/" + "x" * 300, "new/" * 30 + "x" * 300, "file/new"])
def test_a_folder_that_can_never_be_made_leaves_nothing_and_no_note(services: Any, below: str) -> None:
    root = Path(services.settings.storage_roots[0])
    root.mkdir(parents=True, exist_ok=True)
    (root / "file").touch()
    before = set(root.rglob("*"))
    with refused("not_writable", "storage"):
        services.requests.submit(JobSpec.parse(spec(storage=str(root / below))), "me", None)
    assert set(root.rglob("*")) == before
    with services.database.read() as tx:
        assert all_drafts(tx) == []


@pytest.mark.parametrize("visits", [1, 9])
def test_posts_that_come_and_go_while_another_looks_leave_no_folder_to_it(
    services: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visits: int
) -> None:
    """The one finds the folder above its own, which is gone again, with all that is known of it, when it notes that:
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
        found = lexists(path)
        first.give_up()
        if num_visits < visits:
            monkeypatch.setattr(os.path, "lexists", look)
        return found

    second = draft("job-b")
    monkeypatch.setattr(os.path, "lexists", look)
    second.note(1)
    monkeypatch.setattr(os.path, "lexists", lexists)
    assert num_visits
    make(second, "job-b")
    second.give_up()
    assert [*root.iterdir()] == []


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
    """Each notes its folder, makes it and ends; those that were killed, the sweep finds."""
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
    sweep = Drafts(database, roots, abandoned_after_s=1.0)
    while sweep.step():
        pass
    assert set(root.rglob("*")) == expected
    with database.read() as tx:
        assert all_drafts(tx) == []


def test_a_note_of_a_folder_that_can_never_be_made_is_not_kept_for_ever(database: Database, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with database.write() as tx:
        for number, below in enumerate(("file/job", "x" * 300 + "/job")):
            insert_draft(tx, Draft(f"job-{number}", str(tmp_path / below), 1), 1)
    sweep = Drafts(database, StorageRoots([str(tmp_path)]), abandoned_after_s=1.0)
    while sweep.step():
        pass
    with database.read() as tx:
        assert all_drafts(tx) == []


def test_one_that_cannot_be_removed_keeps_no_other_waiting(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'shardyard.db'}")
    database.migrate()
    root = tmp_path / "root"
    (root / "job-b").mkdir(parents=True)
    with database.write() as tx:
        stays = Draft("job-a", str(tmp_path / "no-root-any-more" / "job-a"), 0)
        insert_draft(tx, stays, 1)
        insert_draft(tx, Draft("job-b", str(root / "job-b"), 0), 2)
    drafts = Drafts(database, StorageRoots([str(root)]), abandoned_after_s=1.0)
    while drafts.step():
        pass
    assert not (root / "job-b").exists()
    with database.read() as tx:
        assert oldest_draft(tx, before=10) == stays
    database.close()
