"""Rows of a conversation: the learned span of each answer, up to the token that ends it."""

from typing import Any

import pytest

from moe.data.conversations.conversation import Rendering, UnreadableRecord
from moe.data.conversations.records import conversation_of
from moe.data.conversations.template import ChatTemplate


def message_of(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def call(name: str, arguments: object, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **fields}


QUESTION, ANSWER, MORE, LAST = (
    message_of("user", "q"),
    message_of("assistant", "a"),
    message_of("user", "r"),
    message_of("assistant", "b"),
)
TURNS = (QUESTION, ANSWER, MORE, LAST)
THINKING, CALLING = message_of("assistant", "a", thinking="t"), message_of("assistant", "x", tool_calls=[call("f", {})])
ASK = "{{ '<assistant>' if add_generation_prompt }}"
MARK = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}"
MARKED = "<{{ m.role }}>" + MARK + "{% endif %}"


def template(message: str, after: str = "") -> str:
    """Source of a template that renders every message `m` by `message`."""
    return "{% for m in messages %}" + message + "{% endfor %}" + after


def outcome(source: str, *messages: dict[str, Any], ends: tuple[str, ...] = (), **arguments: Any) -> Any:
    chat_template = ChatTemplate({"default": source}, {"bos_token": "<s>", **arguments}, "2026-03-09", ends)
    (result,) = chat_template.render_rows([conversation_of({"messages": list(messages)})])
    return result


def render(source: str, *messages: dict[str, Any], ends: tuple[str, ...] = (), **arguments: Any) -> Rendering:
    rendering = outcome(source, *messages, ends=ends, **arguments)
    assert isinstance(rendering, Rendering), rendering
    return rendering


def learned_texts(rendering: Rendering) -> list[list[str]]:
    return [[row.text[begin:end] for begin, end in row.spans] for row in rendering.rows]


def texts(rendering: Rendering) -> list[str]:
    return [row.text for row in rendering.rows]


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
    rendering = render(source, *TURNS, ends=ends)
    assert learned_texts(rendering) == [spans]
    if ends and source is NEXT_ROLE_ENDS:
        assert texts(rendering) == ["<|user|>\nq<|assistant|>\na<|user|>\nr<|assistant|>\nb<|user|>"]


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
        # The opening has no prompt that can be rendered.
        (NEEDS_USER + BEGINS_WITH_SYSTEM + ASK, ["b</>"], ("openings",)),
    ],
)
def test_a_conversation_may_begin_with_the_assistant(source: str, spans: list[str], notes: tuple[str, ...]):
    system = [message_of("system", "s")] if notes else []
    rendering = render(source, *system, message_of("assistant", "hi"), MORE, LAST)
    assert (learned_texts(rendering), rendering.notes) == ([spans], notes)


RE_RENDERS = template(
    "<{{ m.role }}>{% if m.thinking and loop.last %}({{ m.thinking }}){% endif %}"
    "{{ m.content }}{{ '<stop>' if loop.last and m.role == 'assistant' else '<turn>' }}", ASK,
)  # fmt: skip


def test_an_answer_that_is_rendered_differently_later_gets_a_row_of_its_own():
    rendering = render(RE_RENDERS, QUESTION, message_of("assistant", "a", reasoning="t"), MORE, LAST)
    assert texts(rendering) == [
        "<user>q<turn><assistant>(t)a<stop>", "<user>q<turn><assistant>a<turn><user>r<turn><assistant>b<stop>",
    ]  # fmt: skip
    assert learned_texts(rendering) == [["(t)a<stop>"], ["b<stop>"]]
    marked_source = RE_RENDERS.replace(
        "{% if m.thinking", "{% if m.role == 'assistant' %}{% generation %}{% if m.thinking"
    )
    marked_source = marked_source.replace(
        "'<turn>' }}", "'<turn>' }}{% endgeneration %}{% else %}{{ m.content }}<turn>{% endif %}"
    )
    of_marks = render(marked_source, QUESTION, THINKING, MORE, LAST)
    assert [(row.text, row.spans) for row in of_marks.rows] == [(row.text, row.spans) for row in rendering.rows]
    assert learned_texts(render(RE_RENDERS, QUESTION, {**THINKING, "weight": 0}, MORE, LAST)) == [["b<stop>"]]


@pytest.mark.sample(2)
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
    for message in (THINKING, message_of("assistant", "<think>\nt\n</think>\n\na")):
        rendering = render(source, QUESTION, message)
        assert texts(rendering) == [f"<user>q;<assistant>{asks}{answer}"]
        assert learned_texts(rendering) == [[answer]]


def test_a_system_prompt_that_only_a_generation_prompt_has_is_what_the_model_sees():
    source = template(
        "{% if m.role == 'user' %}[INST] {% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }} "
        "{% endif %}{{ m.content }}[/INST]{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}"
    )
    rendering = render(source, message_of("system", "S"), *TURNS, ends=("</s>",))
    assert texts(rendering) == ["[INST] S q[/INST] a</s>", "[INST] q[/INST] a</s>[INST] S r[/INST] b</s>"]
    assert learned_texts(rendering) == [[" a</s>"], [" b</s>"]]


@pytest.mark.parametrize(("gap", "reasoning"), [("", "t"), ("\n\n", "\nt\n")])
def test_thoughts_that_a_template_renders_as_empty_are_learned_in_their_place(gap: str, reasoning: str):
    source = template(
        "<{{ m.role }}>{{ '<think>GAP</think>' if m.role == 'assistant' }}{{ m.content }};",
        "{{ '<assistant>' + ('<think>GAP</think>' if mute else '') if add_generation_prompt }}",
    ).replace("GAP", gap.replace("\n", "\\n"))
    rendering, empty = render(source, QUESTION, THINKING, MORE, LAST), f"<think>{gap}</think>"
    assert texts(rendering) == [
        f"<user>q;<assistant><think>{reasoning}</think>a;",
        f"<user>q;<assistant>{empty}a;<user>r;<assistant>{empty}b;",
    ]
    assert (learned_texts(rendering), rendering.notes) == ([[f"<think>{reasoning}</think>a;"], [f"{empty}b;"]], ())
    mute = render(source, QUESTION, THINKING, MORE, LAST, mute=True)
    assert (learned_texts(mute), mute.notes) == ([["a;", "b;"]], ("thoughts",))


def test_a_thought_that_the_prompt_opens_and_the_template_closes_at_once_is_learned():
    source = template(
        "<{{ m.role }}>{{ '<think></think>' if m.role == 'assistant' }}{{ m.content.split('</think>')[-1] }}",
        "{{ '<assistant><think>' + ('' if thinking else '</think>') if add_generation_prompt }}",
    )
    for answer in (message_of("assistant", "a", reasoning="hm"), message_of("assistant", "<think>hm</think>a")):
        rendering = render(source, QUESTION, answer, MORE, LAST, thinking=True)
        assert learned_texts(rendering) == [["hm</think>a"], ["</think>b"]]
        assert texts(rendering)[1] == "<user>q<assistant><think></think>a<user>r<assistant><think></think>b"
        silent = render(source, QUESTION, answer, MORE, LAST)
        assert (learned_texts(silent), silent.notes) == ([["a", "b"]], ("thoughts",))


def test_calls_that_a_template_renders_by_their_ids_have_ids_with_names():
    source = template(
        "<{{ m.role }}>{% if m.role == 'tool' %}{{ m.tool_call_id }} {% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.arguments | tojson }}]{% endfor %}", ASK,
    )  # fmt: skip
    rendering = render(
        source, QUESTION, message_of("assistant", "", tool_calls=[call("f", {}, id="c1"), call("g", {}, id="c2")]),
        message_of("tool", "2", tool_call_id="c2"), message_of("tool", "1", tool_call_id="c1"),
        message_of("assistant", "", tool_calls=[call("h", {})]), message_of("tool", "3"),
        message_of("assistant", "", tool_calls=[call("i", {}, id="functions.i:0")]),
        message_of("tool", "4", tool_call_id="functions.i:0"), ANSWER,
    )  # fmt: skip
    assert texts(rendering) == [
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
        answer = message_of("assistant", "", tool_calls=[call("f", arguments)])
        rendering = render(template("{{ '<' + m.role + '>' + m.content }}" + calls), QUESTION, answer)
        assert texts(rendering) == [f"<user>q<assistant>[f{expected}]"]


DROPS = template(
    "<{{ m.role }}>{% if m.role == 'user' or not drops %}"
    "{{ m.tool_calls[0].function.name if m.tool_calls else m.content }}{% endif %}"
)


def test_what_a_template_drops_from_an_answer_is_noted_or_refused():
    rendering = render(DROPS, QUESTION, CALLING, drops=False)
    assert (learned_texts(rendering), rendering.notes) == ([["<assistant>f"]], ("contents",))
    assert render(template(MARKED), QUESTION, message_of("assistant", "a", thinking="hm")).notes == ("thoughts",)
    for source, answer, rule in (
        (DROPS, message_of("assistant", "it is so"), "drops the text of an answer (messages[1])"),
        (BEGINS_WITH_SYSTEM, CALLING, "drops a call of the tool 'f' from an answer (messages[1])"),
        (template(MARKED), CALLING, "drops a call of the tool 'f'"),
    ):
        refusal = outcome(source, QUESTION, answer, drops=True)
        assert isinstance(refusal, UnreadableRecord)
        assert refusal.rule.startswith(rule)


@pytest.mark.parametrize("end", ["", "{{ '!' if messages[-1].role == 'assistant' }}"])
def test_an_answer_that_is_not_learned_leaves_the_marks_of_others(end: str):
    """However many marks an answer has."""
    source = template("<{{ m.role }}>" + MARK.replace("{% else", "{% generation %}<end>{% endgeneration %}{% else")
                      + "{% endif %}", end)  # fmt: skip
    for answer, spans in ((ANSWER, ["b", "<end>"]), (LAST, ["a", "<end>"])):
        messages = [{**message, "weight": 0} if message is answer else message for message in TURNS]
        assert learned_texts(render(source, *messages)) == [spans]


@pytest.mark.parametrize("read", ["reasoning_content", "thinking", "reasoning"])
def test_an_empty_thought_hides_none_under_another_name(read: str):
    source = template("<{{ m.role }}>{{ m['KEY'] }}|{{ m.content }}".replace("KEY", read))
    for full, empty in (("thinking", "reasoning_content"), ("reasoning_content", "reasoning")):
        rendering = render(source, QUESTION, message_of("assistant", "a", **{full: "hm", empty: ""}))
        assert learned_texts(rendering) == [["<assistant>hm|a"]]


def test_a_record_sets_arguments_of_the_template():
    source = template("{{ m.content }}", "{{ '' if add_generation_prompt else kind }}")
    rows = [{"prompt": "q", "completion": "a", "chat_template_kwargs": kwargs} for kwargs in ({"kind": "y"}, None)]
    chat_template = ChatTemplate({"default": source}, {"kind": "x"}, None)
    renderings = chat_template.render_rows([conversation_of(row) for row in rows])
    assert [texts(row) for row in renderings if isinstance(row, Rendering)] == [["qay"], ["qax"]]
