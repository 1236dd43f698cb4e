"""Rendering of conversations by a chat template, in a limited process: a template's expressions can take any amount of
memory and time.

`python -m moe.data.conversations.rendering` is that process.
"""

import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import FrameType
from typing import Any, NoReturn

from moe.data.conversations.conversation import Conversation, Rendering, UnreadableRecord
from moe.data.conversations.jinja_template import SHORTER, JinjaTemplate
from moe.data.conversations.rows import RowWriter
from moe.data.limited_process import apply_limits


class _TooLong(BaseException):
    """A conversation takes too long. Neither a template nor jinja catches this exception."""


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise _TooLong


def _answers(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        template = JinjaTemplate(request["template"], request["variables"], request["date"])
    except UnreadableRecord as error:
        return [{"rule": error.rule, "remedy": error.remedy, "is_template": True}]
    writer = RowWriter(template, request["ends"])

    def render_prompt(conversation: Conversation) -> Rendering:
        return Rendering((writer.render_prompt(conversation),))

    write: Callable[[Conversation], Rendering] = render_prompt if request["asks"] else writer.rendering
    answers: list[dict[str, Any]] = []
    for fields in request["conversations"]:
        tools = None if fields["tools"] is None else tuple(fields["tools"])
        signal.setitimer(signal.ITIMER_VIRTUAL, request["seconds_each"])
        try:
            fields = {**fields, "messages": tuple(fields["messages"]), "tools": tools}
            rendering = write(Conversation(**fields))
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            answers.append(asdict(rendering))
        except UnreadableRecord as error:
            answers.append({"rule": error.rule, "remedy": error.remedy})
            break
        except _TooLong:
            answers.append({"rule": f"exceeds its time limit of {request['seconds_each']:g} s", "remedy": SHORTER})
            break
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return answers


def to_json(conversations: Sequence[Conversation]) -> list[dict[str, Any]]:
    """Conversations as JSON, for the process."""
    return [
        {
            "messages": conversation.messages,
            "tools": conversation.tools,
            "num_given": conversation.num_given,
            "arguments": conversation.arguments,
            "has_role_spans": conversation.has_role_spans,
        }
        for conversation in conversations
    ]


def _main() -> None:
    apply_limits()
    signal.signal(signal.SIGVTALRM, _interrupt)
    sys.stdout.write(json.dumps(_answers(json.loads(sys.stdin.buffer.read()))))


if __name__ == "__main__":
    _main()
