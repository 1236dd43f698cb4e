"""Conversations written by a chat template, in a process with little memory and time: an expression of a template can
take all there is of both. `python -m moe.data.conversations.rendering` is that process.
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
from moe.data.limited_process import take_limits


class _TooLong(BaseException):
    """The time of a conversation is up. No template's own `except`, nor jinja's, takes it."""


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
            rendering = write(
                Conversation(tuple(fields["messages"]), tools, fields["num_given"], fields["arguments"])
            )
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            answers.append(asdict(rendering))
        except UnreadableRecord as error:
            answers.append({"rule": error.rule, "remedy": error.remedy})
            break
        except _TooLong:
            answers.append(
                {"rule": f"takes longer than {request['seconds_each']:g} s for it", "remedy": SHORTER}
            )
            break
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return answers


def to_json(conversations: Sequence[Conversation]) -> list[dict[str, Any]]:
    """Conversations as the process is given them."""
    return [
        {
            "messages": conversation.messages,
            "tools": conversation.tools,
            "num_given": conversation.num_given,
            "arguments": conversation.arguments,
        }
        for conversation in conversations
    ]


def _main() -> None:
    take_limits()
    signal.signal(signal.SIGVTALRM, _interrupt)
    sys.stdout.write(json.dumps(_answers(json.loads(sys.stdin.buffer.read()))))


if __name__ == "__main__":
    _main()
