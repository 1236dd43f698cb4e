"""Rows of a conversation: what is learned of each answer, up to the token that ends it."""

from typing import Any

import pytest

from moe.data.conversations.conversation import Conversation, Rendering, UnreadableRecord
from moe.data.conversations.records import conversation_of
from moe.data.conversations.template import ChatTemplate


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def rendering(source: str, *messages: dict[str, Any], ends: tuple[str, ...] = (), **arguments: Any) -> Rendering:
    template = ChatTemplate({"default": source}, {"bos_token": "<s>", **arguments}, "2026-03-09", ends)
    (found,) = template.render_rows([conversation_of({"messages": list(messages)})])
    assert isinstance(found, Rendering), found
    return found


def learned(found: Rendering) -> list[list[str]]:
    return [[row.text[a:b] for a, b in row.spans] for row in found.rows]


QUESTION, ANSWER = said("user", "q"), said("assistant", "a")
MORE, LAST = said("user", "r"), said("assistant", "b")
NEXT_ROLE_ENDS = (
    "{% for m in messages %}{{ '<|'+m.role+'|>\n'+m.content }}{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
)


def test_an_answer_is_learned_with_the_role_that_ends_it():
    found = rendering(NEXT_ROLE_ENDS, QUESTION, ANSWER, MORE, LAST, ends=("<|endoftext|>", "<|user|>"))
    assert learned(found) == [["\na<|user|>", "\nb<|user|>"]]
    assert found.rows[0].text == "<|user|>\nq<|assistant|>\na<|user|>\nr<|assistant|>\nb<|user|>"
    assert learned(rendering(NEXT_ROLE_ENDS, QUESTION, ANSWER, MORE, LAST)) == [["\na", "\nb"]]


def test_a_marked_answer_is_learned_with_the_end_behind_the_mark():
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<end>{% endfor %}"
    )
    assert learned(rendering(source, QUESTION, ANSWER, MORE, LAST, ends=("<end>",))) == [["a<end>", "b<end>"]]
    assert learned(rendering(source, QUESTION, ANSWER)) == [["a"]]


BEGINS_WITH_SYSTEM = (
    "{% if messages[0].role == 'system' %}S{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "spans"),
    [
        (BEGINS_WITH_SYSTEM, ["<assistant>hi</>", "<assistant>b</>"]),
        ("{{ bos_token }}" + BEGINS_WITH_SYSTEM, ["<assistant>hi</>", "<assistant>b</>"]),
        (BEGINS_WITH_SYSTEM + "{% if add_generation_prompt %}<assistant>{% endif %}", ["hi</>", "b</>"]),
        ("{% for m in messages %}{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}"
         "{{ raise_exception('turns') }}{% endif %}[{{ m.role }}]{{ m.content }};{% endfor %}",
         ["hi;", "[assistant]b;"]),
    ],
)  # fmt: skip
def test_a_conversation_may_begin_with_the_assistant(source: str, spans: list[str]):
    assert learned(rendering(source, said("assistant", "hi"), MORE, LAST)) == [spans]


def test_an_opening_that_a_template_cannot_ask_for_is_not_learned_and_said():
    source = (
        "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
        "{{ raise_exception('no user') }}{% endif %}"
        + BEGINS_WITH_SYSTEM
        + "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    found = rendering(source, said("system", "s"), said("assistant", "hi"), MORE, LAST)
    assert (learned(found), found.notes) == ([["b</>"]], ("openings",))


RE_RENDERS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.thinking and loop.last %}({{ m.thinking }}){% endif %}"
    "{{ m.content }}{{ '<stop>' if loop.last and m.role == 'assistant' else '<turn>' }}{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt }}"
)


def test_an_answer_that_is_written_otherwise_later_gets_a_row_of_its_own():
    thinking = said("assistant", "a", reasoning="t")
    found = rendering(RE_RENDERS, QUESTION, thinking, MORE, LAST)
    assert [row.text for row in found.rows] == [
        "<user>q<turn><assistant>(t)a<stop>", "<user>q<turn><assistant>a<turn><user>r<turn><assistant>b<stop>",
    ]  # fmt: skip
    assert learned(found) == [["(t)a<stop>"], ["b<stop>"]]
    marked = RE_RENDERS.replace("{% if m.thinking", "{% if m.role == 'assistant' %}{% generation %}{% if m.thinking")
    marked = marked.replace("'<turn>' }}", "'<turn>' }}{% endgeneration %}{% else %}{{ m.content }}<turn>{% endif %}")
    of_marks = rendering(marked, QUESTION, thinking, MORE, LAST)
    assert [(row.text, row.spans) for row in of_marks.rows] == [(row.text, row.spans) for row in found.rows]
    only_last = rendering(RE_RENDERS, QUESTION, {**thinking, "weight": 0}, MORE, LAST)
    assert learned(only_last) == [["b<stop>"]]


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
def test_an_answer_goes_on_from_what_asks_for_it(asks: str, writes: str, answer: str):
    source = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' %}{{ m.content }}{% else %}WRITES{% endif %};"
    source = source.replace("WRITES", writes) + "{% endfor %}{{ '<assistant>ASKS' if add_generation_prompt }}"
    source = source.replace("ASKS", asks.replace("\n", "\\n"))
    for message in (said("assistant", "a", thinking="t"), said("assistant", "<think>\nt\n</think>\n\na")):
        found = rendering(source, QUESTION, message)
        assert found.rows[0].text == f"<user>q;<assistant>{asks}{answer}"
        assert learned(found) == [[answer]]


def test_a_system_prompt_that_is_written_only_to_ask_is_what_the_model_sees():
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {% if loop.last and messages[0].role == 'system' %}"
        "{{ messages[0].content }} {% endif %}{{ m.content }}[/INST]{% elif m.role == 'assistant' %}"
        " {{ m.content }}</s>{% endif %}{% endfor %}"
    )
    found = rendering(source, said("system", "S"), QUESTION, ANSWER, MORE, LAST, ends=("</s>",))
    assert [row.text for row in found.rows] == [
        "[INST] S q[/INST] a</s>", "[INST] q[/INST] a</s>[INST] S r[/INST] b</s>",
    ]  # fmt: skip
    assert learned(found) == [[" a</s>"], [" b</s>"]]


@pytest.mark.parametrize(("gap", "thought"), [("", "t"), ("\n\n", "\nt\n")])
def test_thoughts_that_a_template_writes_as_none_are_learned_in_their_place(gap: str, thought: str):
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ '<think>GAP</think>' if m.role == 'assistant' }}{{ m.content }};"
        "{% endfor %}{{ '<assistant>' + ('<think>GAP</think>' if mute else '') if add_generation_prompt }}"
    ).replace("GAP", gap.replace("\n", "\\n"))
    thinking = said("assistant", "a", thinking="t")
    found = rendering(source, QUESTION, thinking, MORE, LAST)
    empty = f"<think>{gap}</think>"
    assert [row.text for row in found.rows] == [
        f"<user>q;<assistant><think>{thought}</think>a;",
        f"<user>q;<assistant>{empty}a;<user>r;<assistant>{empty}b;",
    ]
    assert learned(found) == [[f"<think>{thought}</think>a;"], [f"{empty}b;"]]
    assert found.notes == ()
    mute = rendering(source, QUESTION, thinking, MORE, LAST, mute=True)
    assert (learned(mute), mute.notes) == ([["a;", "b;"]], ("thoughts",))


def test_calls_that_are_written_by_their_ids_are_named_in_them():
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'tool' %}{{ m.tool_call_id }} {% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.arguments | tojson }}]{% endfor %}{% endfor %}"
        "{{ '<assistant>' if add_generation_prompt }}"
    )

    def call(name: str, id: str | None) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "arguments": {}}} | ({"id": id} if id else {})

    messages = [
        QUESTION, said("assistant", "", tool_calls=[call("f", "c1"), call("g", "c2")]),
        said("tool", "2", tool_call_id="c2"), said("tool", "1", tool_call_id="c1"),
        said("assistant", "", tool_calls=[call("h", None)]), said("tool", "3"),
        said("assistant", "", tool_calls=[call("i", "functions.i:0")]), said("tool", "4", tool_call_id="functions.i:0"),
        ANSWER,
    ]  # fmt: skip
    found = rendering(source, *messages)
    assert found.rows[0].text == (
        "<user>q<assistant>[functions.f:0 {}][functions.g:1 {}]<tool>functions.g:1 2<tool>functions.f:0 1"
        "<assistant>[functions.h:2 {}]<tool>functions.h:2 3<assistant>[functions.i:0 {}]<tool>functions.i:0 4"
        "<assistant>a"
    )


JOINS = (
    "{{ '<' + m.role + '>' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '[' + c.function.name + WRITES + ']' }}{% endfor %}"
)
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
def test_arguments_of_a_call_are_given_in_the_form_that_the_template_takes(writes: str, of_text: str, of_object: str):
    source = "{% for m in messages %}" + JOINS.replace("WRITES", writes) + "{% endfor %}"
    for arguments, expected in ((TEXT, of_text), ({"x": 1}, of_object)):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        found = rendering(source, QUESTION, said("assistant", "", tool_calls=[call]))
        assert found.rows[0].text == f"<user>q<assistant>[f{expected}]"


def test_a_template_that_leaves_out_a_call_is_refused():
    template = ChatTemplate({"default": BEGINS_WITH_SYSTEM}, {}, None)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    (found,) = template.render_rows([Conversation((QUESTION, said("assistant", "x", tool_calls=[call])))])
    assert isinstance(found, UnreadableRecord)
    assert found.rule.startswith("drops a call of the tool 'f' from an answer (messages[1])")


def test_text_that_a_template_drops_from_an_answer_is_told_and_refused_where_it_is_all():
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' or not drops %}"
        "{{ m.tool_calls[0].function.name if m.tool_calls else m.content }}{% endif %}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    found = rendering(source, QUESTION, said("assistant", "let me see", tool_calls=[call]), drops=False)
    assert learned(found) == [["<assistant>f"]]
    assert found.notes == ("contents",)
    template = ChatTemplate({"default": source}, {"drops": True}, None)
    (refusal,) = template.render_rows([Conversation((QUESTION, said("assistant", "it is so")))])
    assert isinstance(refusal, UnreadableRecord)
    assert refusal.rule == "drops the text of an answer (messages[1])"


def test_a_thought_that_the_prompt_opens_and_the_template_closes_at_once_is_learned():
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ '<think></think>' if m.role == 'assistant' }}"
        "{{ m.content.split('</think>')[-1] }}{% endfor %}"
        "{{ '<assistant><think>' + ('' if thinking else '</think>') if add_generation_prompt }}"
    )
    for answer in (said("assistant", "a", reasoning="hm"), said("assistant", "<think>hm</think>a")):
        found = rendering(source, QUESTION, answer, MORE, LAST, thinking=True)
        assert learned(found) == [["hm</think>a"], ["</think>b"]]
        assert found.rows[1].text == "<user>q<assistant><think></think>a<user>r<assistant><think></think>b"
        silent = rendering(source, QUESTION, answer, MORE, LAST)
        assert (learned(silent), silent.notes) == ([["a", "b"]], ("thoughts",))


@pytest.mark.parametrize("end", ["", "{{ '!' if messages[-1].role == 'assistant' }}"])
def test_an_answer_that_is_not_learned_leaves_the_marks_of_others_however_many_each_has(end: str):
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% generation %}<end>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    for skipped, spans in ((ANSWER, ["b", "<end>"]), (LAST, ["a", "<end>"])):
        conversation = (QUESTION, ANSWER, MORE, LAST)
        messages = [{**each, "weight": 0} if each is skipped else each for each in conversation]
        assert learned(rendering(source + end, *messages)) == [spans]


def test_what_a_template_with_marks_drops_is_told_too():
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert rendering(source, QUESTION, said("assistant", "b", thinking="hm")).notes == ("thoughts",)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    template = ChatTemplate({"default": source}, {}, None)
    (found,) = template.render_rows([Conversation((QUESTION, said("assistant", "x", tool_calls=[call])))])
    assert isinstance(found, UnreadableRecord)
    assert found.rule.startswith("drops a call of the tool 'f'")


def test_a_template_that_renders_only_parts_gets_parts():
    source = (
        "{% for m in messages %}<{{ m.role }}>{% for part in m.content if part.type == 'text' %}"
        "{{ part.text }}{% endfor %}{% endfor %}"
    )
    found = rendering(source, QUESTION, ANSWER, MORE, LAST)
    assert found.rows[0].text == "<user>q<assistant>a<user>r<assistant>b"
    assert learned(found) == [["<assistant>a", "<assistant>b"]]


@pytest.mark.parametrize("read", ["reasoning_content", "thinking", "reasoning"])
def test_an_empty_thought_hides_none_under_another_name(read: str):
    source = "{% for m in messages %}<{{ m.role }}>{{ m['KEY'] }}|{{ m.content }}{% endfor %}".replace("KEY", read)
    for full, empty in (("thinking", "reasoning_content"), ("reasoning_content", "reasoning")):
        found = rendering(source, QUESTION, said("assistant", "a", **{full: "hm", empty: ""}))
        assert learned(found) == [["<assistant>hm|a"]]


def test_a_record_sets_arguments_of_the_template():
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '' if add_generation_prompt else kind }}"
    template = ChatTemplate({"default": source}, {"kind": "x"}, None)
    rows = [{"prompt": "q", "completion": "a", "chat_template_kwargs": given} for given in ({"kind": "y"}, None)]
    texts = [
        each.rows[0].text
        for each in template.render_rows([conversation_of(row) for row in rows])
        if isinstance(each, Rendering)
    ]
    assert texts == ["qay", "qax"]
