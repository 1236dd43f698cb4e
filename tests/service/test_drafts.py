"""Folders of jobs that are not stored: removed, one way or another; and never that of one that is."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moe.spec import JobSpec, SpecError
from service.errors import Unavailable
from service.lifecycle.drafts import Drafts
from service.lifecycle.roots import StorageRoots
from service.store.database import Database
from service.store.drafts import finish_draft, insert_draft, oldest_draft
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


def test_a_commit_whose_answer_was_lost_costs_no_job_its_folder(
    services: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_job_whose_folder_the_sweep_has_taken_is_not_stored(
    services: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(storage: str, spec_text: str, asked: str | None) -> None:
        with services.database.write() as tx:
            finish_draft(tx, Path(storage).name)

    monkeypatch.setattr(services.requests, "_put_spec", slow)
    with pytest.raises(Unavailable, match="send it again"):
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
        write, writes = services.database.write, []

        @contextmanager
        def refusing() -> Iterator[Any]:
            """No database here is away when asked to be: the second transaction of a submission, which stores it."""
            writes.append(1)
            with write() as tx:
                if len(writes) == 2:
                    assert list(root.rglob("spec.json"))
                    raise Unavailable("the connection broke")
                yield tx

        monkeypatch.setattr(services.database, "write", refusing)
    else:
        given["start_from"] = {"job": "job-aaaaaaaaaaaa"}
    with pytest.raises((Unavailable, SpecError)):
        services.requests.submit(JobSpec.parse(given), "me", None)
    assert set(root.rglob("*")) == before


def test_one_that_cannot_be_removed_keeps_no_other_waiting(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'shardyard.db'}")
    database.migrate()
    root = tmp_path / "root"
    (root / "job-b").mkdir(parents=True)
    with database.write() as tx:
        insert_draft(tx, "job-a", str(tmp_path / "no-root-any-more" / "job-a"), 1)
        insert_draft(tx, "job-b", str(root / "job-b"), 2)
    drafts = Drafts(database, StorageRoots([str(root)]), abandoned_after_s=1.0)
    while drafts.step():
        pass
    assert not (root / "job-b").exists()
    with database.read() as tx:
        assert oldest_draft(tx, before=10) == ("job-a", str(tmp_path / "no-root-any-more" / "job-a"))
    database.close()
