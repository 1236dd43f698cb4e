"""Text of a chart's template for one object: its YAML, with conditions and values in Go's template language."""

from collections.abc import Sequence
from typing import Any

import yaml

from k8s.chart_builder.rules import Addition, Condition, Override, Replacement, Rules
from k8s.chart_builder.variants import ABSENT, Change, Variants

_BRACES = '{{ "{{" }}'
"""Opening braces of text that is no template, such as the legends of a Grafana board."""

_OPENINGS = ("{{- if ", "{{- with ", "{{- range ")


def object_template(kind: str, name: str, variants: Variants, rules: Rules) -> str:
    """Template of one object in all variants."""
    if (introduction := variants.introduction) is not None:
        inner = Variants.of(introduction.after, variants.without(introduction).changes)
        lines = _in_condition(introduction.feature.condition, _object(kind, name, inner, rules))
    else:
        lines = _object(kind, name, variants, rules)
    return "\n".join(lines) + "\n"


def _object(kind: str, name: str, variants: Variants, rules: Rules) -> list[str]:
    if removals := variants.removals:
        inner = _object(kind, name, variants.without(*removals), rules)
        return _in_condition(_none_of(removals), inner)
    return ["---", *_children(f"{kind}/{name}", variants, 0, rules)]


def _children(path: str, variants: Variants, indent: int, rules: Rules) -> list[str]:
    """Lines of a mapping's keys or a list's items, with the additions of the path's rules."""
    is_list = isinstance(variants.base, list)
    lines: list[str] = []
    for key in variants.field_keys():
        prefix = "-" if is_list else f"{_scalar(key)}:"
        entry_path = f"{path}/{key.replace('/', '~1')}"
        lines = _joined(lines, _entry(entry_path, prefix, variants.child(key), indent, rules))
    for rule in rules.of(path):
        if isinstance(rule, Addition):
            added_lines = rule.lines.replace("INDENT", str(indent)).splitlines()
            lines += [line if line.startswith("{{-") else " " * indent + line for line in added_lines]
    return lines


def _entry(path: str, prefix: str, variants: Variants, indent: int, rules: Rules) -> list[str]:
    """Lines of one key with its value, or of one item."""
    if variants.base is ABSENT:
        return _absent_in_base(path, prefix, variants, indent, rules)
    if removals := variants.removals:
        inner = _entry(path, prefix, variants.without(*removals), indent, rules)
        return _in_condition(_none_of(removals), inner)
    for rule in rules.of(path):
        if isinstance(rule, Replacement):
            return [f"{' ' * indent}{prefix} {rule.expression}"]
        if isinstance(rule, Override):
            value = f"{prefix} {{{{- toYaml . | nindent {indent + 2} }}}}"
            if not isinstance(variants.base, dict | list):
                value = f"{prefix} {{{{ toYaml . }}}}"
            lines = _value(path, prefix, variants, indent, rules)
            return [f"{{{{- with {rule.value} }}}}", " " * indent + value, "{{- else }}", *lines, "{{- end }}"]
        if isinstance(rule, Condition):
            condition = rule.expression.format(key=path.rpartition("/")[2])
            return _in_condition(condition, _value(path, prefix, variants, indent, rules))
    return _value(path, prefix, variants, indent, rules)


def _value(path: str, prefix: str, variants: Variants, indent: int, rules: Rules) -> list[str]:
    pad = " " * indent
    if variants.changes and not variants.is_mergeable:
        return _choice(variants.changes, variants.base, prefix, indent)
    if not isinstance(variants.base, dict | list) or not variants.field_keys():
        return _plain(prefix, variants.base, indent)
    # The items of a list are no further in than its key, as YAML's writers have it.
    inner = indent if prefix != "-" and isinstance(variants.base, list) else indent + 2
    lines = _children(path, variants, inner, rules)
    if not variants.base:
        with_items = [f"{{{{- if {_any_of(variants.changes)} }}}}", pad + prefix, *lines]
        return [*with_items, "{{- else }}", *_plain(prefix, variants.base, indent), "{{- end }}"]
    if prefix == "-" and not lines[0].startswith("{{"):
        return [f"{pad}- {lines[0].removeprefix(pad + '  ')}", *lines[1:]]
    return [pad + prefix, *lines]


def _absent_in_base(path: str, prefix: str, variants: Variants, indent: int, rules: Rules) -> list[str]:
    if (introduction := variants.introduction) is not None:
        inner = Variants.of(introduction.after, variants.without(introduction).changes)
        return _in_condition(introduction.feature.condition, _entry(path, prefix, inner, indent, rules))
    introductions = [change for change in variants.changes if change.after is not ABSENT]
    lines: list[str] = []
    for change in reversed(introductions):
        statement = "else if" if lines else "if"
        value = _entry(path, prefix, Variants(change.after), indent, rules)
        lines += [f"{{{{- {statement} {change.feature.condition} }}}}", *value]
    return [*lines, "{{- end }}"]


def _choice(changes: tuple[Change, ...], base: Any, prefix: str, indent: int) -> list[str]:
    """The value of the last feature that is on, else the base's."""
    lines: list[str] = []
    for change in reversed(changes):
        statement = "else if" if lines else "if"
        lines += [f"{{{{- {statement} {change.feature.condition} }}}}", *_plain(prefix, change.after, indent)]
    return [*lines, "{{- else }}", *_plain(prefix, base, indent), "{{- end }}"]


def _any_of(changes: Sequence[Change]) -> str:
    conditions = [change.feature.condition for change in changes]
    return conditions[0] if len(conditions) == 1 else f"or {' '.join(f'({condition})' for condition in conditions)}"


def _none_of(changes: Sequence[Change]) -> str:
    return f"not ({_any_of(changes)})"


def _in_condition(condition: str, lines: list[str]) -> list[str]:
    return [f"{{{{- if {condition} }}}}", *lines, "{{- end }}"]


def _joined(lines: list[str], more: list[str]) -> list[str]:
    """The lines of two blocks, in one statement if both are in the same condition."""
    start = _last_block(lines)
    if start is None or lines[start] != more[0] or _has_else(lines[start:]) or _has_else(more):
        return [*lines, *more]
    return [*lines[:-1], *more[1:]]


def _last_block(lines: list[str]) -> int | None:
    """Index of the statement that the last line ends."""
    if not lines or lines[-1] != "{{- end }}":
        return None
    depth = 0
    for index in reversed(range(len(lines))):
        depth += (lines[index] == "{{- end }}") - lines[index].startswith(_OPENINGS)
        if depth == 0:
            return index
    return None


def _has_else(block: list[str]) -> bool:
    """Whether a block is not one statement alone, without alternatives."""
    depth = 0
    for number, line in enumerate(block, start=1):
        depth += line.startswith(_OPENINGS) - (line == "{{- end }}")
        if (depth == 0 and number < len(block)) or (depth == 1 and line.startswith("{{- else")):
            return True
    return False


def _plain(prefix: str, value: Any, indent: int) -> list[str]:
    """Lines of a value without conditions."""
    pad = " " * indent
    if isinstance(value, str) and "\n" in value:
        chomp = "|" if value.endswith("\n") and not value.endswith("\n\n") else "|-"
        lines = value.replace("{{", _BRACES).rstrip("\n").split("\n")
        return [f"{pad}{prefix} {chomp}", *(f"{pad}  {line}".rstrip() for line in lines)]
    if isinstance(value, dict | list) and value:
        text = yaml.safe_dump(value, width=10**6, allow_unicode=True, sort_keys=False)
        lines = text.replace("{{", _BRACES).rstrip("\n").split("\n")
        if prefix == "-":
            return [f"{pad}- {lines[0]}", *(f"{pad}  {line}" for line in lines[1:])]
        return [pad + prefix, *(f"{pad}  {line}" for line in lines)]
    return [f"{pad}{prefix} {_scalar(value)}"]


def _scalar(value: Any) -> str:
    text = yaml.safe_dump(value, width=10**6, allow_unicode=True).removesuffix("...\n").strip()
    return text.replace("{{", _BRACES)
