"""Rows of a conversation: the learned span of each answer, up to the token that ends it."""

from typing import Any

import pytest

from moe.data.conversations.conversation import Rendering, UnreadableRecord
from moe.data.conversations.records import conversation_of
from moe.data.conversations.template import ChatTemplate


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(name: str, arguments: object, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


QUESTION, ANSWER, MORE, LAST = said("user", "q"), said("assistant", "a"), said("user", "r"), said("assistant", "b")
TURNS = (QUESTION, ANSWER, MORE, LAST)
THINKING, CALLING = said("assistant", "a", thinking="t"), said("assistant", "x", tool_calls=[call("f", {})])
ASK = "{{ '<assistant>' if add_generation_prompt }}"
MARK = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}"
MARKED = "<{{ m.role }}>" + MARK + "{% endif %}"


def template(message: str, after: str = "") -> str:
    """Source of a template that renders every message `m` by `message`."""
    return "{% for m in messages %}" + message + "{% endfor %}" + after


def outcome(source: str, *messages: dict[str, Any], ends: tuple[str, ...] = (), **arguments: Any) -> Any:
    chat_template = ChatTemplate({"default": source}, {"bos_token": "<s>", **arguments}, "2026-03-09", ends)
    (rendered,) = chat_template.render_rows([conversation_of({"messages": list(messages)})])
    return rendered


def rendering(source: str, *messages: dict[str, Any], ends: tuple[str, ...] = (), **arguments: Any) -> Rendering:
    rendered = outcome(source, *messages, ends=ends, **arguments)
    assert isinstance(rendered, Rendering), rendered
    return rendered


def learned(rendered: Rendering) -> list[list[str]]:
    return [[row.text[begin:end] for begin, end in row.spans] for row in rendered.rows]


def texts(rendered: Rendering) -> list[str]:
    return [row.text for row in rendered.rows]


NEXT_ROLE_ENDS = template("{{ '<|'+m.role+'|>\n'+m.content }}", "{{ '<|assistant|>' if add_generation_prompt }}")
PARTS = template("<{{ m.role }}>{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}")


@pytest.mark.parametrize(
    ("source", "ends", "spans"),
    [
        (NEXT_ROLE_ENDS, ("<|endoftext|>", "<|user|>"), ["\na<|user|>", "\nb<|user|>"]),
        (NEXT_ROLE_ENDS, (), ["\na", "\nb"]),
        (template(MARKED + "<end>"), ("<end>",), ["a<end>", "b<end>"]),
        (template(MARKED + "<end>"), (), ["a", "b"]),
        (PARTS, (), ["<assistant>a", "<assistant>b"]),  # its messages have a list of parts as content
    ],
)  # fmt: skip
def test_an_answer_is_learned_with_the_token_that_ends_it(source: str, ends: tuple[str, ...], spans: list[str]):
    rendered = rendering(source, *TURNS, ends=ends)
    assert learned(rendered) == [spans]
    if ends and source is NEXT_ROLE_ENDS:
        assert texts(rendered) == ["<|user|>\nq<|assistant|>\na<|user|>\nr<|assistant|>\nb<|user|>"]


BEGINS_WITH_SYSTEM = "{% if messages[0].role == 'system' %}S{% endif %}" + template("<{{ m.role }}>{{ m.content }}</>")
TAKES_TURNS = template(
    "{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}{{ raise_exception('turns') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }};"
)
NEEDS_USER = "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('-') }}{% endif %}"


@pytest.mark.parametrize(
    ("source", "spans", "notes"),
    [
        (BEGINS_WITH_SYSTEM, ["<assistant>hi</>", "<assistant>b</>"], ()),
        ("{{ bos_token }}" + BEGINS_WITH_SYSTEM, ["<assistant>hi</>", "<assistant>b</>"], ()),
        (BEGINS_WITH_SYSTEM + ASK, ["hi</>", "b</>"], ()),
        (TAKES_TURNS, ["hi;", "[assistant]b;"], ()),
        (NEEDS_USER + BEGINS_WITH_SYSTEM + ASK, ["b</>"], ("openings",)),  # no prompt can be rendered for the opening
    ],
)
def test_a_conversation_may_begin_with_the_assistant(source: str, spans: list[str], notes: tuple[str, ...]):
    system = [said("system", "s")] if notes else []
    rendered = rendering(source, *system, said("assistant", "hi"), MORE, LAST)
    assert (learned(rendered), rendered.notes) == ([spans], notes)


RE_RENDERS = template(
    "<{{ m.role }}>{% if m.thinking and loop.last %}({{ m.thinking }}){% endif %}"
    "{{ m.content }}{{ '<stop>' if loop.last and m.role == 'assistant' else '<turn>' }}", ASK,
)  # fmt: skip


def test_an_answer_that_is_rendered_differently_later_gets_a_row_of_its_own():
    rendered = rendering(RE_RENDERS, QUESTION, said("assistant", "a", reasoning="t"), MORE, LAST)
    assert texts(rendered) == [
        "<user>q<turn><assistant>(t)a<stop>", "<user>q<turn><assistant>a<turn><user>r<turn><assistant>b<stop>",
    ]  # fmt: skip
    assert learned(rendered) == [["(t)a<stop>"], ["b<stop>"]]
    marked = RE_RENDERS.replace("{% if m.thinking", "{% if m.role == 'assistant' %}{% generation %}{% if m.thinking")
    marked = marked.replace("'<turn>' }}", "'<turn>' }}{% endgeneration %}{% else %}{{ m.content }}<turn>{% endif %}")
    of_marks = rendering(marked, QUESTION, THINKING, MORE, LAST)
    assert [(row.text, row.spans) for row in of_marks.rows] == [(row.text, row.spans) for row in rendered.rows]
    assert learned(rendering(RE_RENDERS, QUESTION, {**THINKING, "weight": 0}, MORE, LAST)) == [["b<stop>"]]


@pytest.mark.parametrize(
    ("asks", "writes", "answer"),
    [
        ("<think>", "</think>{{ m.content }}", "t</think>a;"),
        ("<think>\n", "{{ m.content }}", "t\n</think>\n\na;"),
        ("<think>\n", "<think></think>{{ m.content }}", "t\n</think>a;"),
        ("<seed:think>", "{{ m.content }}", "t</seed:think>a;"),
        ("<think>\n\n</think>\n\n", "{{ m.content }}", "a;"),
        ("<final>", "{{ m.content }}", "a;"),
    ],
)
def test_an_answer_continues_its_generation_prompt(asks: str, writes: str, answer: str):
    source = template("<{{ m.role }}>{% if m.role == 'user' %}{{ m.content }}{% else %}" + writes + "{% endif %};", ASK)
    source = source.replace("'<assistant>'", f"'<assistant>{asks}'".replace("\n", "\\n"))
    for message in (THINKING, said("assistant", "<think>\nt\n</think>\n\na")):
        rendered = rendering(source, QUESTION, message)
        assert texts(rendered) == [f"<user>q;<assistant>{asks}{answer}"]
        assert learned(rendered) == [[answer]]


def test_a_system_prompt_that_only_a_generation_prompt_has_is_what_the_model_sees():
    source = template(
        "{% if m.role == 'user' %}[INST] {% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }} "
        "{% endif %}{{ m.content }}[/INST]{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}"
    )
    rendered = rendering(source, said("system", "S"), *TURNS, ends=("</s>",))
    assert texts(rendered) == ["[INST] S q[/INST] a</s>", "[INST] q[/INST] a</s>[INST] S r[/INST] b</s>"]
    assert learned(rendered) == [[" a</s>"], [" b</s>"]]


@pytest.mark.parametrize(("gap", "thought"), [("", "t"), ("\n\n", "\nt\n")])
def test_thoughts_that_a_template_renders_as_empty_are_learned_in_their_place(gap: str, thought: str):
    source = template(
        "<{{ m.role }}>{{ '<think>GAP</think>' if m.role == 'assistant' }}{{ m.content }};",
        "{{ '<assistant>' + ('<think>GAP</think>' if mute else '') if add_generation_prompt }}",
    ).replace("GAP", gap.replace("\n", "\\n"))
    rendered, empty = rendering(source, QUESTION, THINKING, MORE, LAST), f"<think>{gap}</think>"
    assert texts(rendered) == [
        f"<user>q;<assistant><think>{thought}</think>a;",
        f"<user>q;<assistant>{empty}a;<user>r;<assistant>{empty}b;",
    ]
    assert (learned(rendered), rendered.notes) == ([[f"<think>{thought}</think>a;"], [f"{empty}b;"]], ())
    mute = rendering(source, QUESTION, THINKING, MORE, LAST, mute=True)
    assert (learned(mute), mute.notes) == ([["a;", "b;"]], ("thoughts",))


def test_a_thought_that_the_prompt_opens_and_the_template_closes_at_once_is_learned():
    source = template(
        "<{{ m.role }}>{{ '<think></think>' if m.role == 'assistant' }}{{ m.content.split('</think>')[-1] }}",
        "{{ '<assistant><think>' + ('' if thinking else '</think>') if add_generation_prompt }}",
    )
    for answer in (said("assistant", "a", reasoning="hm"), said("assistant", "<think>hm</think>a")):
        rendered = rendering(source, QUESTION, answer, MORE, LAST, thinking=True)
        assert learned(rendered) == [["hm</think>a"], ["</think>b"]]
        assert texts(rendered)[1] == "<user>q<assistant><think></think>a<user>r<assistant><think></think>b"
        silent = rendering(source, QUESTION, answer, MORE, LAST)
        assert (learned(silent), silent.notes) == ([["a", "b"]], ("thoughts",))


def test_calls_that_a_template_renders_by_their_ids_have_ids_with_names():
    source = template(
        "<{{ m.role }}>{% if m.role == 'tool' %}{{ m.tool_call_id }} {% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.arguments | tojson }}]{% endfor %}", ASK,
    )  # fmt: skip
    rendered = rendering(
        source, QUESTION, said("assistant", "", tool_calls=[call("f", {}, id="c1"), call("g", {}, id="c2")]),
        said("tool", "2", tool_call_id="c2"), said("tool", "1", tool_call_id="c1"),
        said("assistant", "", tool_calls=[call("h", {})]), said("tool", "3"),
        said("assistant", "", tool_calls=[call("i", {}, id="functions.i:0")]),
        said("tool", "4", tool_call_id="functions.i:0"), ANSWER,
    )  # fmt: skip
    assert texts(rendered) == [
        "<user>q<assistant>[functions.f:0 {}][functions.g:1 {}]<tool>functions.g:1 2<tool>functions.f:0 1"
        "<assistant>[functions.h:2 {}]<tool>functions.h:2 3<assistant>[functions.i:0 {}]<tool>functions.i:0 4"
        "<assistant>a"
    ]


TEXT = '{"x":  1}'


@pytest.mark.parametrize(
    ("writes", "of_text", "of_object"),
    [
        ("c.function.arguments", TEXT, '{"x": 1}'),
        ("(c.function.arguments | tojson)", '{"x": 1}', '{"x": 1}'),
        ("(c.function.arguments.x | string)", "1", "1"),
        ("(c.function.arguments if c.function.arguments is string else c.function.arguments | tojson)", TEXT,
         '{"x": 1}'),
    ],
)  # fmt: skip
def test_arguments_of_a_call_have_the_form_that_the_template_takes(writes: str, of_text: str, of_object: str):
    calls = "{% for c in m.tool_calls or [] %}{{ '[' + c.function.name + " + writes + " + ']' }}{% endfor %}"
    for arguments, expected in ((TEXT, of_text), ({"x": 1}, of_object)):
        answer = said("assistant", "", tool_calls=[call("f", arguments)])
        rendered = rendering(template("{{ '<' + m.role + '>' + m.content }}" + calls), QUESTION, answer)
        assert texts(rendered) == [f"<user>q<assistant>[f{expected}]"]


DROPS = template(
    "<{{ m.role }}>{% if m.role == 'user' or not drops %}"
    "{{ m.tool_calls[0].function.name if m.tool_calls else m.content }}{% endif %}"
)


def test_what_a_template_drops_from_an_answer_is_noted_or_refused():
    kept = rendering(DROPS, QUESTION, CALLING, drops=False)
    assert (learned(kept), kept.notes) == ([["<assistant>f"]], ("contents",))
    assert rendering(template(MARKED), QUESTION, said("assistant", "a", thinking="hm")).notes == ("thoughts",)
    for source, answer, rule in (
        (DROPS, said("assistant", "it is so"), "drops the text of an answer (messages[1])"),
        (BEGINS_WITH_SYSTEM, CALLING, "drops a call of the tool 'f' from an answer (messages[1])"),
        (template(MARKED), CALLING, "drops a call of the tool 'f'"),
    ):
        refusal = outcome(source, QUESTION, answer, drops=True)
        assert isinstance(refusal, UnreadableRecord)
        assert refusal.rule.startswith(rule)


@pytest.mark.parametrize("end", ["", "{{ '!' if messages[-1].role == 'assistant' }}"])
def test_an_answer_that_is_not_learned_leaves_the_marks_of_others(end: str):
    """However many marks each has."""
    source = template("<{{ m.role }}>" + MARK.replace("{% else", "{% generation %}<end>{% endgeneration %}{% else")
                      + "{% endif %}", end)  # fmt: skip
    for skipped, spans in ((ANSWER, ["b", "<end>"]), (LAST, ["a", "<end>"])):
        messages = [{**message, "weight": 0} if message is skipped else message for message in TURNS]
        assert learned(rendering(source, *messages)) == [spans]


@pytest.mark.parametrize("read", ["reasoning_content", "thinking", "reasoning"])
def test_an_empty_thought_hides_none_under_another_name(read: str):
    source = template("<{{ m.role }}>{{ m['KEY'] }}|{{ m.content }}".replace("KEY", read))
    for full, empty in (("thinking", "reasoning_content"), ("reasoning_content", "reasoning")):
        rendered = rendering(source, QUESTION, said("assistant", "a", **{full: "hm", empty: ""}))
        assert learned(rendered) == [["<assistant>hm|a"]]


def test_a_record_sets_arguments_of_the_template():
    source = template("{{ m.content }}", "{{ '' if add_generation_prompt else kind }}")
    rows = [{"prompt": "q", "completion": "a", "chat_template_kwargs": kwargs} for kwargs in ({"kind": "y"}, None)]
    chat_template = ChatTemplate({"default": source}, {"kind": "x"}, None)
    rendered = chat_template.render_rows([conversation_of(row) for row in rows])
    assert [texts(row) for row in rendered if isinstance(row, Rendering)] == [["qay"], ["qax"]]
