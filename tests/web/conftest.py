"""Control planes and a browser for tests of the pages."""

from tests.postgres.server import server  # noqa: F401, a fixture
from tests.service.conftest import backend, own_plane, plane, token_plane  # noqa: F401, fixtures
from tests.web.browser import browser  # noqa: F401, a fixture
