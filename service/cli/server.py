"""Connection of commands to a control plane."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from service.cli.failures import Misuse

if TYPE_CHECKING:
    from service.client import Client, Job

NEARBY_JOBS = 200


def connect(url: str | None) -> "Client":
    """Client for `url`, or for the environment's URL."""
    with _bare_httpx():
        from service.client import Client

    return Client(url)


@contextmanager
def _bare_httpx() -> Iterator[None]:
    """Import httpx without its command line (click, pygments), which takes as long as the rest of a command."""
    if "click" in sys.modules:
        yield
        return
    sys.modules["click"] = None  # type: ignore[assignment]
    try:
        import httpx  # noqa: F401

        yield
    finally:
        del sys.modules["click"]


def require_id(id: str) -> None:
    """Raises Misuse for an empty id (an unset shell variable), which would address all jobs."""
    if not id:
        raise Misuse("the job's id must not be empty; 'shardyard ls' lists the jobs")


def find_job(client: "Client", id: str) -> "Job":
    """The job with this id. Raises Misuse with similar ids if there is none."""
    from service.client import ApiError

    require_id(id)
    try:
        return client.job(id)
    except ApiError as error:
        if error.status not in (404, 422):
            raise
        raise Misuse(f"there is no job {id!r} at {client.url}{_nearest(client, id)}") from None


def _nearest(client: "Client", id: str) -> str:
    import difflib

    jobs = list(client.jobs(limit=NEARBY_JOBS))
    if not jobs:
        return "; there are no jobs yet, create one with 'shardyard submit FILE'"
    by_name = [job.id for job in jobs if id in (job.name, job.id[: len(id)])]
    similar = by_name or difflib.get_close_matches(id, [job.id for job in jobs], n=3, cutoff=0.6)
    if not similar:
        return "; 'shardyard ls' lists the jobs"
    return f"; did you mean {' or '.join(similar[:3])}?"
