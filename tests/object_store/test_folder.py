"""A folder on a real S3 server: writes appear complete or not at all, and errors are OSErrors in words."""

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
from tests.object_store.s3_server import DROP, EXPIRED, FULL, SLOW_DOWN, Proxy, Request, S3Server
from tests.processes import await_that

PART = bytes(64 << 20)
"""More than s3fs sends at once, so that the upload has parts."""
URL = "s3://bucket/jobs/job-a"

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


def test_files_appear_when_they_are_complete_with_one_request_and_no_copy(s3: S3Server, proxy: Proxy) -> None:
    folder = Folder(URL)
    folder.write("one", b"1")
    with folder.create("two") as file:
        file.write(b"22")
        assert folder.names() == ["one"]
    assert folder.sizes() == {"one": 1, "two": 2}
    writes = [request for request in proxy.requests if request.method != "GET"]
    assert [(request.method, request.path) for request in writes] == [
        ("PUT", "/bucket/jobs/job-a/one"),
        ("PUT", "/bucket/jobs/job-a/two"),
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize("before", [None, b"before"])
def test_an_interrupted_upload_leaves_what_was_there(s3: S3Server, before: bytes | None) -> None:
    folder = Folder(URL)
    if before is not None:
        folder.write("file", before)

    def fail_to_write() -> None:
        with folder.create("file") as file:
            file.write(PART)
            assert s3.num_open_uploads() == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_to_write()
    assert s3.num_open_uploads() == 0
    assert s3.list_keys() == ([] if before is None else ["jobs/job-a/file"])
    assert before is None or folder.read("file") == before


_UPLOAD_FOREVER = f"""
from moe.storage.folder import Folder
with Folder({URL!r}).create("file") as file:
    while True:
        file.write(bytes({len(PART)}))
"""


@pytest.mark.slow
def test_a_killed_upload_leaves_no_file(s3: S3Server) -> None:
    with subprocess.Popen([sys.executable, "-c", _UPLOAD_FOREVER]) as process:
        await_that(lambda: s3.num_open_uploads() == 1)
        process.send_signal(signal.SIGKILL)
    assert Folder(URL).names() == s3.list_keys() == []
    _stream(Folder(URL), b"whole")
    assert Folder(URL).read("file") == b"whole"
    (upload,) = s3.client.list_multipart_uploads(Bucket="bucket")["Uploads"]  # its parts stay: docs say what ends them
    s3.client.abort_multipart_upload(Bucket="bucket", Key=upload["Key"], UploadId=upload["UploadId"])


def test_what_others_write_and_remove_is_seen_at_once(s3: S3Server) -> None:
    folder = Folder(URL)
    folder.write("file", b"first")
    assert (folder.names(), folder.read("file")) == (["file"], b"first")
    s3.client.put_object(Bucket="bucket", Key="jobs/job-a/file", Body=b"longer than first")
    s3.client.put_object(Bucket="bucket", Key="jobs/job-a/other/inner", Body=b"")
    with folder.open("file") as file:
        assert file.read() == b"longer than first"
    assert folder.names() == ["file", "other"]
    s3.client.delete_object(Bucket="bucket", Key="jobs/job-a/file")
    with pytest.raises(FileNotFoundError):
        folder.open("file")
    assert folder.names("no-folder") == []


def test_marks_of_folders_are_no_entries(s3: S3Server) -> None:
    for key in ("jobs/job-a/", "jobs/job-a/attempts/", "jobs/job-a/attempts/1/"):  # as a console makes them
        s3.client.put_object(Bucket="bucket", Key=key, Body=b"")
    attempt = AttemptFolder(URL, 1)
    assert [attempt.groups(), attempt.begin_group(0), attempt.groups()] == [[], 0, [0]]
    assert Folder(URL).sizes("attempts/1") == {"group-0": 0}
    assert Folder(URL).names() == ["attempts"]
    Folder(URL).remove("")
    assert s3.list_keys() == []


@pytest.mark.slow
def test_a_folder_of_more_entries_than_a_page_is_listed_and_removed(s3: S3Server) -> None:
    for number in range(1100):
        s3.client.put_object(Bucket="bucket", Key=f"jobs/job-a/{number:04}", Body=b"")
    s3.client.put_object(Bucket="bucket", Key="jobs/job-ab", Body=b"")  # no file of the folder
    folder = Folder(URL)
    assert folder.names() == [f"{number:04}" for number in range(1100)]
    folder.remove("")
    assert s3.list_keys() == ["jobs/job-ab"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_missing_bucket_is_an_error_and_is_not_created(s3: S3Server, operation: str) -> None:
    with pytest.raises(OSError, match="the bucket does not exist") as raised:
        OPERATIONS[operation](Folder("s3://no-bucket/jobs/job-a"))
    assert raised.value.errno == errno.ENODEV
    assert str(raised.value.filename).startswith("s3://no-bucket/jobs/job-a")
    assert [bucket["Name"] for bucket in s3.client.list_buckets()["Buckets"]] == ["bucket"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_expired_credentials_are_named_and_nothing_is_changed(s3: S3Server, proxy: Proxy, operation: str) -> None:
    folder = Folder(URL)
    folder.write("file", b"old")
    proxy.answer = lambda _request: EXPIRED
    with pytest.raises(PermissionError, match=r"refuses access .*renew") as raised:
        OPERATIONS[operation](folder)
    assert raised.value.errno == errno.EACCES
    proxy.answer = lambda _request: None
    assert folder.read("file") == b"old"


@pytest.mark.sample(1)
@pytest.mark.parametrize("refusal", [DROP, SLOW_DOWN])
def test_busy_answers_and_lost_connections_are_retried(s3: S3Server, proxy: Proxy, refusal: Any) -> None:
    folder = Folder(URL)
    folder.write("file", b"old")
    for operation in ("names", "write", "read"):
        proxy.refuse_next(refusal, 2)
        OPERATIONS[operation](folder)
    assert folder.read("file") == b"new"


def test_a_store_without_room_is_full(s3: S3Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    proxy.answer = lambda request: FULL if request.method == "PUT" else None
    for operation in ("write", "stream"):
        with pytest.raises(OSError, match="no room") as raised:
            OPERATIONS[operation](Folder(URL))
        assert raised.value.errno == errno.ENOSPC


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("refusal", [SLOW_DOWN, DROP, None])
def test_a_store_that_stays_away_is_an_os_error_that_names_the_file(
    s3: S3Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, operation: str, refusal: Any
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    if refusal is None:
        proxy.close()
    proxy.answer = lambda _request: refusal
    with pytest.raises(OSError) as raised:
        OPERATIONS[operation](Folder(URL))
    assert raised.value.errno == (errno.EBUSY if refusal == SLOW_DOWN else errno.EHOSTUNREACH)
    assert str(raised.value.filename).startswith(URL)


def test_a_file_that_cannot_be_read_is_not_taken_for_a_damaged_one(s3: S3Server, proxy: Proxy) -> None:
    folder = Folder(URL)
    folder.write("file", b"old")
    proxy.answer = lambda request: EXPIRED if request.method == "GET" and "list-type" not in request.path else None
    found = fault(folder, "file", 3, "0" * 64)
    assert isinstance(found, UnreadableStorage)


def test_a_fault_in_the_middle_of_reading(s3: S3Server, proxy: Proxy) -> None:
    folder = Folder(URL)
    folder.write("file", os.urandom(100))
    with folder.open("file") as file:
        proxy.answer = lambda _request: EXPIRED
        with pytest.raises(PermissionError, match="renew"):
            file.read()


@pytest.mark.slow
def test_requests_name_no_other_bucket(s3: S3Server, proxy: Proxy) -> None:
    for operation in OPERATIONS.values():
        Folder(URL).write("file", b"old")
        operation(Folder(URL))
    assert {request.path.split("/")[1].partition("?")[0] for request in proxy.requests} == {"bucket"}
    assert Request("GET", "/") not in proxy.requests
