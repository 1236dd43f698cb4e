"""What the terminal says of a job by the kind of its model."""

from typing import Any, cast

import pytest

from service.cli.view.kinds import words_of
from service.client.job import Job


@pytest.mark.parametrize(
    ("corpus", "command"), [("chat", "--chat TEXT"), ("preference", "--chat TEXT"), ("documents", "PROMPT")]
)
def test_a_model_of_conversations_is_used_by_chatting(corpus: str, command: str) -> None:
    spec = {"model": {"kind": "language"}, "data": {"corpus": corpus}}
    job = Job(cast(Any, None), cast(Any, None), {"spec": spec})  # no server is asked
    assert f"'shardyard generate {{job}} {command}'" in words_of(job).to_use_it
