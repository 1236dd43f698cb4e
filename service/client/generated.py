"""A text as a job's model makes it."""

import json
from collections.abc import Generator
from typing import Any
from urllib.parse import quote

from moe.records import Ending
from service.client.connection import ServiceConnection
from service.client.errors import ApiError, Unreachable
from service.client.sse import messages

SILENCE_S = 600.0
"""Longest without a byte: others' turns may come first, and then a model be loaded."""


def stream_generation(
    connection: ServiceConnection, job_id: str, body: dict[str, Any]
) -> Generator[str, None, Ending]:
    """Pieces of the text, and at last how it ended. Raises ApiError where it is refused or breaks off, and Unreachable
    where the connection does. Closing the generator closes its connection, which breaks the text off."""
    path, headers = f"/v1/jobs/{quote(job_id, safe='')}/generate", {"accept": "text/event-stream"}
    with connection.stream(path, headers, SILENCE_S, body=body) as chunks:
        for message in messages(chunks):
            fields = json.loads(message.data)
            match message.event:
                case "text":
                    yield fields["text"]
                case "error":
                    raise ApiError.from_problem(int(fields.get("status", 503)), fields)
                case "end":
                    return Ending.read(fields)
    raise Unreachable(connection.url, "the text broke off without an end")
