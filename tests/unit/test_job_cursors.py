"""Cursors of job lists: read as written, and refused otherwise, whatever they contain."""

import base64
import json

import pytest

from service.control.api.jobs import read_mark, write_mark
from service.control.errors import Invalid
from service.control.store.job_lists import JobSort, Mark


@pytest.mark.parametrize(
    ("sort", "mark"),
    [(JobSort.LOSS, Mark(3, 1.5)), (JobSort.PROGRESS, Mark(3, None)), (JobSort.NAME_DOWN, Mark(3, "a" * 63))],
)
def test_a_cursor_is_read_as_written(sort: JobSort, mark: Mark) -> None:
    assert read_mark(write_mark(mark, sort), sort) == mark


@pytest.mark.parametrize("sort", [JobSort.LOSS, JobSort.NAME])
@pytest.mark.parametrize(
    "text",
    ["[" * 5000, json.dumps(["loss", 1, 10**40]), '["loss",1,true]', '["loss",1,NaN]', '["loss",true,1.0]',
     json.dumps(["name", 1, "a\0"]), json.dumps(["name", 2**63, "a"]), "[]", "{}"],
)  # fmt: skip
def test_a_cursor_of_another_origin_is_refused(text: str, sort: JobSort) -> None:
    cursor = base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")
    with pytest.raises(Invalid) as refusal:
        read_mark(cursor, sort)
    assert refusal.value.problems[0].path == "query.cursor"
