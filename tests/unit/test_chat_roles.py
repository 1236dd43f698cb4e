"""Roles of the tokens of rendered conversations, against a reading of the published templates' own message headers."""

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from moe.data.conversations.conversation import RenderedText, Rendering
from moe.data.conversations.records import conversation_of
from moe.data.conversations.template import ChatTemplate
from tests.grid import num_cases
from tests.unit.chats import DATE
from tests.unit.published_templates import read_template
from tests.unit.test_chat_published import ENDS, TEMPLATES, TOKENS, conversation

CHATML = r"<\|im_start\|>(\w+)\n(?:(?!<\|im_end\|>).)*<\|im_end\|>\n?"
LLAMA = r"<\|start_header_id\|>(\w+)<\|end_header_id\|>.*?<\|eot_id\|>"
MESSAGES = {
    "qwen2_5": CHATML, "qwen3": CHATML, "qwen3_instruct_2507": CHATML, "qwen3_5_think": CHATML,
    "nemotron_3_nano": CHATML, "lfm2": CHATML, "lfm2_2_5": CHATML,
    "llama3": LLAMA,
    "gptoss": r"<\|start\|>(\w+).*?(?:<\|end\|>|<\|return\|>|<\|call\|>)",
    "phi3_5": r"<\|(system|user|assistant)\|>\n.*?<\|end\|>\n(?:</s>)?",
}  # fmt: skip
"""Messages of templates, and the role in their headers. Those of LFM2.5 have generation marks."""
AS_USER = "<tool_response>"
HEADERS = {"developer": "system", "functions": "tool"}


def rows_of(name: str, source: str, rows: Sequence[dict[str, Any]]) -> list[tuple[RenderedText, ...]]:
    template = ChatTemplate({"default": source}, TOKENS, DATE.isoformat(), ENDS.get(name, ()))
    conversations = [replace(conversation_of(row), has_role_spans=True) for row in rows]
    renderings = [rendering for rendering in template.render_rows(conversations) if isinstance(rendering, Rendering)]
    assert len(renderings) == len(rows)
    return [rendering.rows for rendering in renderings]


def roles_by_headers(text: str, pattern: str, *, has_system: bool) -> list[str | None]:
    """Role of each character. A system message that the template itself adds has none."""
    roles: list[str | None] = [None] * len(text)
    first = 0
    for match in re.finditer(pattern, text, re.DOTALL):
        role = HEADERS.get(match[1], match[1])
        if role == "user" and AS_USER in match[0]:
            role = "tool"
        if role == "system":  # with what the template writes before it
            roles[first : match.end()] = [role if has_system else None] * (match.end() - first)
        else:
            roles[match.start() : match.end()] = [role] * len(match[0])
        first = match.end()
    return roles


def roles_by_spans(row: RenderedText) -> list[str | None]:
    roles: list[str | None] = [None] * len(row.text)
    for begin, end, role in [*(row.role_spans or ()), *((*span, "assistant") for span in row.spans)]:
        roles[begin:end] = [role] * (end - begin)
    return roles


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", MESSAGES)
def test_roles_are_those_of_the_headers_of_published_templates(name: str):
    rng, counts, num_unknown = random.Random(name), Counter[str | None](), 0
    rows = [
        conversation(rng, takes_tools=TEMPLATES[name], thoughts=rng.choice([None, "reasoning_content"]))
        for _ in range(num_cases(30))
    ]
    for row, texts in zip(rows, rows_of(name, read_template(name), rows), strict=True):
        has_system = row["messages"][0]["role"] == "system"
        for text in texts:
            roles = roles_by_spans(text)
            expected_roles = roles_by_headers(text.text, MESSAGES[name], has_system=has_system)
            counts.update(roles)
            num_unknown += roles.count(None) - expected_roles.count(None)
            assert all(role in (None, expected_role) for role, expected_role in zip(roles, expected_roles, strict=True))
    assert counts.keys() >= {"system", "user", "assistant"}
    assert ("tool" in counts) == TEMPLATES[name]
    # Qwen3 renders a call without thoughts differently, if it is last, than between others with thoughts.
    assert num_unknown <= (0.05 * counts.total() if name == "qwen3" else 0)


def spans_of(source: str, *messages: tuple[str, str]) -> list[tuple[str, str]]:
    ((row,),) = rows_of("", source, [{"messages": [{"role": role, "content": text} for role, text in messages]}])
    return [(row.text[begin:end], role) for begin, end, role in row.role_spans or ()]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("A{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}{{ '[assistant]' if "
         "add_generation_prompt }}", [("A[system]s;", "system"), ("[user]u;", "user"), ("[assistant]a;", "assistant")]),
        # A system message within the user's.
        ("{% for m in messages[1:] %}[{{ m.role }}]{{ messages[0].content if loop.first }}{{ m.content }}{% endfor %}"
         "{{ '[assistant]' if add_generation_prompt }}", [("[assistant]a", "assistant")]),
        # The system message after the user's, whose beginning is not known.
        ("{% for m in messages[1:] %}{{ '<' + m.content + '>' if m.role == 'user' else '' }}{{ messages[0].content if "
         "loop.first else '' }}{{ ':' + m.content if m.role == 'assistant' else '' }}{% endfor %}{{ ':' if "
         "add_generation_prompt }}", [(":a", "assistant")]),
    ],
    ids=["exact", "merged", "later"],
)  # fmt: skip
def test_text_of_several_roles_has_none(source: str, expected: list[tuple[str, str]]):
    assert spans_of(source, ("system", "s"), ("user", "u"), ("assistant", "a")) == expected
