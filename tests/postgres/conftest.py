"""One PostgreSQL server for all these tests, and a database for each."""

from collections.abc import Iterator
from itertools import count

import pytest

from tests.postgres.server import PostgresServer, programs

_NUMBERS = count()


@pytest.fixture(scope="package")
def server() -> Iterator[PostgresServer]:
    if programs() is None:
        pytest.skip("no PostgreSQL server is installed (Debian: apt-get install postgresql)")
    server = PostgresServer()
    yield server
    server.close()


@pytest.fixture
def url(server: PostgresServer) -> str:
    """URL of an empty database."""
    return server.create(f"jobs_{next(_NUMBERS)}")
