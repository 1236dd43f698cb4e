"""A folder on a server of S3 or Google Cloud Storage: writes appear complete or not at all, and errors are OSErrors in
words."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from moe.storage.folder import Folder
from moe.storage.sealing import UnreadableStorage, fault
from service.wire.attempt_folder import AttemptFolder
from tests.object_store.conftest import Store
from tests.object_store.proxy import DROP, FULL, Proxy, Refusal, Request
from tests.object_store.s3_server import S3Server
from tests.processes import await_that

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")  # gcsfs's own
PART = bytes(64 << 20)
"""More than clients send at once, so that the upload has parts."""
PATH = "bucket/jobs/job-a"
URL = f"s3://{PATH}"


def folder_of(store: Store, path: str = PATH) -> Folder:
    return Folder(f"{store.scheme}://{path}")


OPERATIONS: dict[str, Callable[[Folder], Any]] = {
    "names": lambda folder: folder.names(),
    "names below": lambda folder: folder.names("checkpoints"),
    "read": lambda folder: folder.read("file"),
    "read a part": lambda folder: folder.read("file", 0, 3),
    "open": lambda folder: folder.open("file"),
    "write": lambda folder: folder.write("file", b"new"),
    "stream": lambda folder: _stream(folder, b"new"),
    "remove": lambda folder: folder.remove("file"),
}


def _stream(folder: Folder, content: bytes) -> None:
    with folder.create("file") as file:
        file.write(content)


def test_files_appear_when_they_are_complete_without_a_copy(store: Store, proxy: Proxy) -> None:
    folder = folder_of(store)
    folder.write("one", b"1")
    with folder.create("two") as file:
        file.write(b"22")
        assert folder.names() == ["one"]
    assert folder.sizes() == {"one": 1, "two": 2}
    writes = [request for request in proxy.requests if request.method != "GET"]
    assert tuple((request.method, request.path.partition("?")[0]) for request in writes) == store.puts


@pytest.mark.sample(1)
@pytest.mark.parametrize("before", [None, b"before"])
def test_an_interrupted_upload_leaves_what_was_there(store: Store, before: bytes | None) -> None:
    folder = folder_of(store)
    if before is not None:
        folder.write("file", before)

    def fail_to_write() -> None:
        with folder.create("file") as file:
            file.write(PART)
            assert store.num_open_uploads() == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_to_write()
    assert store.num_open_uploads() == 0
    assert store.list_keys() == ([] if before is None else ["jobs/job-a/file"])
    assert before is None or folder.read("file") == before


_UPLOAD_FOREVER = f"""
import sys
from moe.storage.folder import Folder
with Folder(sys.argv[1]).create("file") as file:
    while True:
        file.write(bytes({len(PART)}))
"""


@pytest.mark.slow
def test_a_killed_upload_leaves_no_file(store: Store) -> None:
    with subprocess.Popen([sys.executable, "-c", _UPLOAD_FOREVER, folder_of(store).url]) as process:
        await_that(lambda: store.num_open_uploads() == 1)
        process.send_signal(signal.SIGKILL)
    assert folder_of(store).names() == store.list_keys() == []
    _stream(folder_of(store), b"whole")
    assert folder_of(store).read("file") == b"whole"
    assert store.num_open_uploads() == 1  # its parts stay: docs say what ends them


def test_what_others_write_and_remove_is_seen_at_once(store: Store) -> None:
    folder = folder_of(store)
    folder.write("file", b"first")
    assert (folder.names(), folder.read("file")) == (["file"], b"first")
    store.put("jobs/job-a/file", b"longer than first")
    store.put("jobs/job-a/other/inner", b"")
    with folder.open("file") as file:
        assert file.read() == b"longer than first"
    assert folder.names() == ["file", "other"]
    store.delete("jobs/job-a/file")
    with pytest.raises(FileNotFoundError):
        folder.open("file")
    assert folder.names("no-folder") == []


def test_marks_of_folders_are_no_entries(store: Store) -> None:
    for key in ("jobs/job-a/", "jobs/job-a/attempts/", "jobs/job-a/attempts/1/"):  # as a console makes them
        store.put(key, b"")
    attempt = AttemptFolder(folder_of(store).url, 1)
    assert [attempt.groups(), attempt.begin_group(0), attempt.groups()] == [[], 0, [0]]
    assert folder_of(store).sizes("attempts/1") == {"group-0": 0}
    assert folder_of(store).names() == ["attempts"]
    folder_of(store).remove("")
    assert store.list_keys() == []


@pytest.mark.slow
def test_a_folder_of_more_entries_than_a_page_is_listed_and_removed(s3: S3Server) -> None:
    for number in range(1100):
        s3.put(f"jobs/job-a/{number:04}", b"")
    s3.put("jobs/job-ab", b"")  # no file of the folder
    folder = Folder(URL)
    assert folder.names() == [f"{number:04}" for number in range(1100)]
    folder.remove("")
    assert s3.list_keys() == ["jobs/job-ab"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_missing_bucket_is_an_error_and_is_not_created(store: Store, operation: str) -> None:
    with pytest.raises(OSError, match="the bucket does not exist") as raised:
        OPERATIONS[operation](folder_of(store, "no-bucket/jobs/job-a"))
    assert raised.value.errno == errno.ENODEV
    assert str(raised.value.filename).startswith(f"{store.scheme}://no-bucket/jobs/job-a")
    assert store.buckets() == ["bucket"]


@pytest.mark.parametrize("operation", ["names", "read"])
def test_a_bucket_that_is_deleted_later_is_not_an_empty_one(
    store: Store, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe.storage.folder.BUCKET_CHECK_S", 0.0)
    folder = folder_of(store, "short-lived/jobs/job-a")
    store.create_bucket("short-lived")
    assert folder.names() == []
    store.delete_bucket("short-lived")
    with pytest.raises(OSError, match="the bucket does not exist"):
        OPERATIONS[operation](folder)


@pytest.mark.sample(3)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_expired_credentials_are_named_and_nothing_is_changed(store: Store, proxy: Proxy, operation: str) -> None:
    folder = folder_of(store)
    folder.write("file", b"old")
    proxy.answer = lambda _request: store.denial
    with pytest.raises(PermissionError, match=r"refuses access .*renew") as raised:
        OPERATIONS[operation](folder)
    assert raised.value.errno == errno.EACCES
    proxy.answer = lambda _request: None
    assert folder.read("file") == b"old"


@pytest.mark.sample(1)
@pytest.mark.parametrize("trouble", ["lost connection", "overload"])
def test_busy_answers_and_lost_connections_are_retried(store: Store, proxy: Proxy, trouble: str) -> None:
    folder, refusal = folder_of(store), store.overload if trouble == "overload" else DROP
    folder.write("file", b"old")
    for operation in ("names", "write", "read"):
        proxy.refuse_next(refusal, 2)
        OPERATIONS[operation](folder)
    assert folder.read("file") == b"new"


def test_a_store_without_room_is_full(s3: S3Server, s3_proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3_proxy.answer = lambda request: FULL if request.method == "PUT" else None
    for operation in ("write", "stream"):
        with pytest.raises(OSError, match="no room") as raised:
            OPERATIONS[operation](Folder(URL))
        assert raised.value.errno == errno.ENOSPC


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.usefixtures("few_attempts")
@pytest.mark.parametrize("trouble", ["overload", "lost connection", "no server"])
def test_a_store_that_stays_away_is_an_os_error_that_names_the_file(
    store: Store, proxy: Proxy, operation: str, trouble: str
) -> None:
    if trouble == "no server":
        proxy.close()
    proxy.answer = lambda _request: store.overload if trouble == "overload" else DROP
    with pytest.raises(OSError) as raised:
        OPERATIONS[operation](folder_of(store))
    assert raised.value.errno == (errno.EBUSY if trouble == "overload" else errno.EHOSTUNREACH)
    assert str(raised.value.filename).startswith(folder_of(store).url)


def test_a_file_that_cannot_be_read_is_not_taken_for_a_damaged_one(store: Store, proxy: Proxy) -> None:
    folder = folder_of(store)
    folder.write("file", b"old")

    def refuse_content(request: Request) -> Refusal | None:
        is_listing = "list-type" in request.path or "prefix=" in request.path
        return store.denial if request.method == "GET" and not is_listing else None

    proxy.answer = refuse_content
    found = fault(folder, "file", 3, "0" * 64)
    assert isinstance(found, UnreadableStorage)


def test_a_fault_in_the_middle_of_reading(store: Store, proxy: Proxy) -> None:
    folder = folder_of(store)
    folder.write("file", os.urandom(100))
    with folder.open("file") as file:
        proxy.answer = lambda _request: store.denial
        with pytest.raises(PermissionError, match="renew"):
            file.read()


@pytest.mark.slow
def test_requests_name_no_other_bucket(s3: S3Server, s3_proxy: Proxy) -> None:
    for operation in OPERATIONS.values():
        Folder(URL).write("file", b"old")
        operation(Folder(URL))
    assert {request.path.split("/")[1].partition("?")[0] for request in s3_proxy.requests} == {"bucket"}
    assert Request("GET", "/") not in s3_proxy.requests
