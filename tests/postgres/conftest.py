"""One PostgreSQL server for all these tests, and a database for each."""

import pytest

from tests.postgres.server import PostgresServer, server  # noqa: F401, a fixture


@pytest.fixture
def url(server: PostgresServer) -> str:  # noqa: F811, the fixture
    """URL of an empty database."""
    return server.create()
