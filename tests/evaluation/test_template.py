"""Plain templates compared with Jinja: accepted ones contain only text and columns, and render alike."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jinja2 import nodes
from lm_eval.utils import apply_template, env

from moe.evaluation.template import FILTERS, NotPlain, Template

COLUMNS = {"question": "  What is ß, {{x}}?\n", "x": 3, "y": 0.5, "a_1": "ÉTÉ über", "range": "far", "is": "no"}
MARK = re.compile(r"\{[{%#]")
HARMLESS = (nodes.Template, nodes.Output, nodes.TemplateData, nodes.Name, nodes.Filter)

PIECES = st.one_of(
    st.sampled_from([
        "{{", "}}", "{%", "%}", "{#", "#}", "{", "}", "|", "-", ".", "(", ")", "[", "]", ",", "+", "~", " ", "\n",
        "\r\n", "'",
        "if", "for", "set", "import", "include", "else", "is", "not", "none", "True", "loop", "self", "range", "cycler",
        "__class__", "lower", "trim", "upper", "capitalize", "attr", "map", "x", "y", "question", "a_1", "0", "1 * 2",
    ]),
    st.sampled_from(["{{x}}", "{{ question | trim }}", "{{a_1|lower|capitalize}}", "{{self}}", "{{range}}"]),
    st.text(max_size=4),
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=12).map("".join)


def parse_or_none(text: str) -> Template | None:
    try:
        return Template.parse(text)
    except NotPlain:
        return None


@given(TEXTS)
@example("{{ x }}\n")
@example("a\r\nb\r{{y}}")
@example("{{x}}}")
@example("}} %} #} { x }")
@example("{{\nquestion\n|\ntrim\n}}")
@example("{{ True }}")
@example("{{ is }}")
@example("{{ self }}")
def test_whatever_is_accepted_is_text_and_columns_and_renders_as_jinja_has_it(text: str) -> None:
    template = parse_or_none(text)
    if template is None:
        return
    tree = env.parse(text)
    for node in (tree, *tree.find_all(nodes.Node)):
        assert isinstance(node, HARMLESS), node
        if isinstance(node, nodes.Filter):
            assert node.name in FILTERS
            assert not any((node.args, node.kwargs, node.dyn_args, node.dyn_kwargs))
    assert {name.name for name in tree.find_all(nodes.Name)} == set(template.columns)
    if set(template.columns) <= COLUMNS.keys():
        assert template.render(COLUMNS) == apply_template(text, COLUMNS)


@given(
    st.text(st.sampled_from("{}%#|-. ax\r\n") | st.characters(), max_size=20).filter(lambda text: not MARK.search(text))
)
def test_text_without_a_mark_of_jinja_is_never_refused(text: str) -> None:
    template = parse_or_none(text)
    assert template.render({}) == apply_template(text, {})


@given(
    inner=st.sampled_from([
        "x()", "x.y", "x['y']", "x[0]", "x + 1", "x ~ x", "-x", "not x", "x if y else y", "[x, y]", "(x)", "'x'", "1",
        "x,", "x | attr('__class__')", "x | map('lower')", "x | length", "x | lower()", "lower(x)", "range(9)",
        "x == y", "cycler.__init__.__globals__", "self._TemplateReference__context", "x | unknown", "x |", "",
        "|lower", "true", "-",
    ]),
    before=st.text(max_size=5), after=st.text(max_size=5), blank=st.sampled_from(["", " ", "\n"]),
)  # fmt: skip
def test_calls_attributes_and_arithmetic_are_refused(inner: str, before: str, after: str, blank: str) -> None:
    assert parse_or_none(f"{before}{{{{{blank}{inner}{blank}}}}}{after}") is None


@given(
    inner=st.sampled_from([
        "if x", "for a in x", "set x = 1", "include 'x'", "import 'x' as y", "from 'x' import y", "extends 'x'", "raw",
        "macro x()", "call x()", "filter lower", "block x", "do x()", "",
    ]),
    before=st.text(max_size=5), minus=st.sampled_from(["", "-", "+"]),
)  # fmt: skip
def test_statements_and_comments_are_refused(inner: str, before: str, minus: str) -> None:
    assert parse_or_none(f"{before}{{%{minus} {inner} %}}x") is None
    assert parse_or_none(f"{before}{{#{minus} {inner} #}}x") is None
    assert parse_or_none(f"{before}{{{{{minus or '-'} x }}}}") is None


def test_what_is_refused_is_shown() -> None:
    with pytest.raises(NotPlain, match=r"^\{\{ x\.y \}\} and more$"):
        Template.parse("first {{x}}, then {{ x.y }} and more")
