"""One S3 server for all these tests, emptied for each, and a proxy before it."""

from collections.abc import Iterator

import fsspec
import pytest

from tests.object_store.s3_server import Proxy, S3Server, environment


@pytest.fixture(scope="package")
def s3_process() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(s3_process: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server with an empty bucket, which this process and those that it starts use for `s3://`."""
    yield from _used(s3_process, s3_process.port, monkeypatch)


@pytest.fixture
def proxy(s3_process: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before the server, which this process and those that it starts use for `s3://`."""
    proxy = Proxy(s3_process.port)
    for _ in _used(s3_process, proxy.port, monkeypatch):
        yield proxy
    proxy.close()


def _used(server: S3Server, port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    for name, value in environment(port).items():
        monkeypatch.setenv(name, value)
    file_system = fsspec.get_filesystem_class("s3")
    file_system.clear_instance_cache()  # its clients have read the variables
    for key in server.list_keys():
        server.client.delete_object(Bucket="bucket", Key=key)
    yield server
    file_system.clear_instance_cache()
