"""Lists of jobs on PostgreSQL, which compares and sorts in its own way: the same as on SQLite."""

from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import update

from service.control.store import tables
from service.control.store.database import Database
from service.control.store.job_lists import JobFilter, JobSort, Mark, count_states, list_jobs
from tests.web.stored_jobs import store_jobs


@pytest.mark.slow
def test_every_order_has_each_job_once_and_is_that_of_sqlite(url: str, tmp_path: Path) -> None:
    for job_filter in (
        JobFilter(),
        JobFilter(search="_%", owner="ana"),
        JobFilter(search="SWITCH", states=("failed",)),
    ):
        for sort in JobSort:
            pages = [pages_of(place, job_filter, sort) for place in stores(url, tmp_path)]
            assert pages[0] == pages[1]
            assert len(set(pages[0])) == len(pages[0])


def stores(url: str, folder: Path) -> list[str]:
    """URLs of both databases, filled with the same jobs, some without a loss."""
    urls = [url, f"sqlite:///{folder / 'jobs.db'}"]
    for place in urls:
        with closing(Database(place)) as database:
            database.migrate()
            with database.read() as tx:
                is_filled = bool(count_states(tx, JobFilter()))
            if not is_filled:
                store_jobs(database, 40)
                with database.write() as tx:
                    tx.execute(update(tables.jobs).where(tables.jobs.c.number % 7 == 0).values(loss=None))
    return urls


def pages_of(url: str, job_filter: JobFilter, sort: JobSort) -> list[int]:
    """Numbers of all jobs, by pages of nine."""
    numbers: list[int] = []
    mark: Mark | None = None
    with closing(Database(url)) as database, database.read() as tx:
        while True:
            page, mark = list_jobs(tx, job_filter, sort, after=mark, limit=9)
            numbers += [job.number for job in page]
            if mark is None:
                break
        states = count_states(tx, job_filter)
    chosen = {state: number for state, number in states.items() if not job_filter.states or state in job_filter.states}
    assert sum(chosen.values()) == len(numbers)
    return numbers
