"""A server of each kind of object store for all these tests, emptied for each, and a proxy before it."""

from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest

from tests.object_store.gcs_server import GcsServer
from tests.object_store.proxy import Proxy
from tests.object_store.s3_server import S3Server

Store = S3Server | GcsServer


@pytest.fixture(scope="package")
def s3_process() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


@pytest.fixture(scope="package")
def gcs_server() -> Iterator[GcsServer]:
    server = GcsServer()
    yield server
    server.close()


@pytest.fixture
def s3(s3_process: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """An S3 server with an empty bucket, which this process and those that it starts use for `s3://`."""
    with _empty_store(s3_process, s3_process.port, monkeypatch):
        yield s3_process


@pytest.fixture
def s3_proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before the S3 server, which this process and those that it starts use for `s3://`."""
    yield from _proxy(s3, monkeypatch)


@pytest.fixture(params=["s3", "gcs"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A server of either kind with an empty bucket, which this process and those that it starts use."""
    server = request.getfixturevalue("s3_process" if request.param == "s3" else "gcs_server")
    with _empty_store(server, server.port, monkeypatch):
        yield server


@pytest.fixture
def proxy(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before the server, which this process and those that it starts use."""
    yield from _proxy(store, monkeypatch)


@pytest.fixture
def few_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that give up soon. gcsfs has no setting for its six attempts, whose pauses add up to half a minute: they
    are real attempts against the server, without the pauses."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr("gcsfs.retry.min", lambda *_: 0.0, raising=False)


@contextmanager
def _empty_store(server: Store, port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Empty the server, and have this process and those that it starts use it at a port."""
    for name, value in server.environment(port).items():
        monkeypatch.setenv(name, value)
    file_system = fsspec.get_filesystem_class(server.scheme)
    file_system.clear_instance_cache()  # its clients have read the variables
    for key in server.list_keys():
        server.delete(key)
    server.abort_uploads()
    yield
    file_system.clear_instance_cache()


def _proxy(server: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy = Proxy(server.port, server.body_of)
    with _empty_store(server, proxy.port, monkeypatch):
        yield proxy
    proxy.close()
