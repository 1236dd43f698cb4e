"""Job files: YAML or JSON in, with line and column of syntax errors; JSON Schema out."""

import codecs
import json
import re
from pathlib import Path
from typing import Any

import yaml

from moe.spec.errors import SpecError, spec_error
from moe.spec.job import JobSpec
from moe.spec.sweep.spec import SweepSpec

MAX_SPEC_BYTES = 1_000_000
MAX_DEPTH = 64
MAX_VALUES = 10_000
MAX_INT_DIGITS = 30
_REFER_TO_DATA = "refer to data by path instead of including it"
_TOO_DEEP = "is nested too deeply", "use fewer levels"
_TOO_MANY_VALUES = f"must have at most {MAX_VALUES:,} keys and values", _REFER_TO_DATA
_TOO_LONG_NUMBER = "contains a number with too many digits", "shorten it"
"""(rule, remedy)"""

_ENCODINGS = (
    (codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"), (codecs.BOM_UTF16_BE, "UTF-16"),
)  # fmt: skip
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's loader is many times as fast
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_FLOAT = re.compile(
    r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))"
    r"|\.(?:nan|NaN|NAN)"
)


class _DuplicateYAMLKey(yaml.constructor.ConstructorError):
    """Duplicate key in a mapping."""

    def __init__(self, key: str, mark: yaml.Mark) -> None:
        super().__init__(None, None, f"the key {key!r} occurs twice", mark)
        self.key = key


class _YAMLTooLarge(yaml.MarkedYAMLError):
    """YAML that exceeds a limit."""

    def __init__(self, rule: str, remedy: str, mark: yaml.Mark) -> None:
        super().__init__(None, None, rule, mark)
        self.rule, self.remedy = rule, remedy


class _StrictLoader(_LOADER):
    """YAML 1.2 loader of plain data with decimal numbers: `1e-3` is a number, `1:30` and `0x10` are text. Refuses
    duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        # A tag can declare a scalar or a list a mapping; super() reports it.
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in keys:
                raise _DuplicateYAMLKey(key, key_node.start_mark)
            if isinstance(key, str):
                keys.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = self._number(node, _INT).replace("_", "")
        if len(text) > MAX_INT_DIGITS:
            raise _YAMLTooLarge(*_TOO_LONG_NUMBER, node.start_mark)
        return int(text)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        text = self._number(node, _FLOAT, _INT).replace("_", "").lower()
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))

    def _number(self, node: yaml.ScalarNode, *patterns: re.Pattern[str]) -> str:
        text: str = self.construct_scalar(node)
        if not any(pattern.fullmatch(text) for pattern in patterns):  # an explicit tag declared it a number
            raise yaml.constructor.ConstructorError(None, None, "not a decimal number", node.start_mark)
        return text


_TAG = "tag:yaml.org,2002:"
_PLAIN = ("null", "bool", "str", "seq", "map")
_StrictLoader.yaml_constructors = {
    **{f"{_TAG}{name}": yaml.SafeLoader.yaml_constructors[f"{_TAG}{name}"] for name in _PLAIN},
    f"{_TAG}int": _StrictLoader.construct_yaml_int,
    f"{_TAG}float": _StrictLoader.construct_yaml_float,
    None: yaml.SafeLoader.yaml_constructors[None],
}
_StrictLoader.yaml_implicit_resolvers = {
    first: [entry for entry in entries if entry[0].removeprefix(_TAG) in ("null", "bool", "merge")]
    for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, _pattern in (("int", _INT), ("float", _FLOAT)):
    _StrictLoader.add_implicit_resolver(
        f"{_TAG}{_name}", re.compile(rf"(?:{_pattern.pattern})\Z"), list("-+.0123456789")
    )


def _load_yaml(text: str) -> Any:
    """Parse YAML. Raises MarkedYAMLError, also for aliases and for input that is too deep or large, found in a fast
    first pass."""
    depth = num_values = 0
    for event in yaml.parse(text, _StrictLoader):
        mark: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases are not allowed in a spec", mark)
        num_values += isinstance(event, yaml.NodeEvent)
        if num_values > MAX_VALUES:
            raise _YAMLTooLarge(*_TOO_MANY_VALUES, mark)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise _YAMLTooLarge(*_TOO_DEEP, mark)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    return yaml.load(text, _StrictLoader)


def _has_more_values(data: Any, limit: int) -> bool:
    num_values, parts = 1, [data]
    while parts and num_values <= limit:
        part = parts.pop()
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        num_values += len(inner) * (2 if isinstance(part, dict) else 1)
        parts.extend(inner)
    return num_values > limit


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON object hook that refuses duplicate keys."""
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise _DuplicateKey(key)
        mapping[key] = value
    return mapping


class _DuplicateKey(Exception):
    """Duplicate key in a JSON object; the decoder does not give its position."""


def _syntax_error(path: str, format: str, reason: str) -> SpecError:
    rule = f"is not valid {format}: {_lower_first(reason)}"
    return spec_error("invalid_syntax", path, None, rule, "correct the syntax there")


def json_fault(error: json.JSONDecodeError) -> str:
    """The decoder's message without position, as `expected a value`."""
    return _JSON_FAULTS.get(error.msg, _lower_first(error.msg).removesuffix(" at"))


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


_JSON_FAULTS = {
    "Expecting value": "expected a value",
    "Expecting ',' delimiter": "expected a comma",
    "Expecting ':' delimiter": "expected a colon",
    "Expecting property name enclosed in double quotes": "expected a key in double quotes",
    "Extra data": "unexpected text after the end",
    "Unterminated string starting at": "unterminated string",
}


def _duplicate_key(path: str, key: str) -> SpecError:
    return spec_error("duplicate", path, key, "occurs twice", "remove one of the two")


def _too_large(path: str, rule: str, remedy: str) -> SpecError:
    return spec_error("too_large", path, None, rule, remedy)


_SURROGATE = re.compile("[\ud800-\udfff]")
_SURROGATE_ESCAPE = re.compile(r"\\(?:u|U0000)[dD][89a-fA-F]")


def parse_text(text: str, name: str = "spec", format: str = "yaml") -> Any:
    """Parse YAML or JSON text, with or without byte-order mark. Raises SpecError with line and column, from 1."""
    text = text.removeprefix("\ufeff")
    if len(text.encode()) > MAX_SPEC_BYTES:
        rule = f"must have at most {MAX_SPEC_BYTES:,} bytes, not {len(text.encode()):,}"
        raise _too_large(name, rule, _REFER_TO_DATA)
    if format == "json":
        try:
            data = json.loads(text, object_pairs_hook=_unique_keys)
        except _DuplicateKey as error:
            raise _duplicate_key(name, error.args[0]) from None
        except json.JSONDecodeError as error:
            path = f"{name}, line {error.lineno}, column {error.colno}"
            raise _syntax_error(path, "JSON", json_fault(error)) from None
        except ValueError:  # Python refuses integers of thousands of digits
            raise _too_large(name, *_TOO_LONG_NUMBER) from None
        except RecursionError:
            raise _too_large(name, *_TOO_DEEP) from None
        if _has_more_values(data, MAX_VALUES):
            raise _too_large(name, *_TOO_MANY_VALUES)
        return _checked_text(data, text)
    try:
        return _checked_text(_load_yaml(text), text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        lines = text.split("\n")
        if line > len(lines):  # libyaml reports the end of the text as a line of its own
            line, column = len(lines), len(lines[-1]) + 1
        path = f"{name}, line {line}, column {column}"
        if isinstance(error, _DuplicateYAMLKey):
            raise _duplicate_key(path, error.key) from None
        if isinstance(error, _YAMLTooLarge):
            raise _too_large(path, error.rule, error.remedy) from None
        fault = (error.problem or "unknown fault").replace("did not find expected", "expected")
        raise _syntax_error(path, "YAML", fault) from None
    except (yaml.YAMLError, ValueError) as error:
        raise _syntax_error(f"{name}, line 1, column 1", "YAML", str(error)) from None
    except RecursionError:
        raise _too_large(name, *_TOO_DEEP) from None


def _checked_text(data: Any, text: str) -> Any:
    """Return `data`. Raises SpecError for lone surrogates, which escapes allow and UTF-8 does not."""
    if _SURROGATE_ESCAPE.search(text) is None:
        return data
    values: list[tuple[str, Any]] = [("", data)]
    while values:
        place, value = values.pop()
        if isinstance(value, dict):
            values += [(f"{place}.{key}", key) for key in value]
            values += [(f"{place}.{key}", inner) for key, inner in value.items()]
        elif isinstance(value, list):
            values += [(f"{place}[{index}]", inner) for index, inner in enumerate(value)]
        elif isinstance(value, str) and (match := _SURROGATE.search(value)) is not None:
            path = place.removeprefix(".").encode(errors="backslashreplace").decode()
            rule = f"must not contain half of a surrogate pair (U+{ord(match[0]):04X})"
            raise spec_error(
                "invalid_encoding", path or "body", ascii(value)[1:-1], rule, "write the character itself, or remove it"
            )
    return data


def read_job(path: str | Path) -> JobSpec:
    """Read a YAML or JSON file. Raises SpecError if it is invalid, OSError if it cannot be read."""
    return JobSpec.parse(read_plain(path))


def read_plain(path: str | Path) -> Any:
    """Read a YAML or JSON file as plain data. Raises SpecError if it cannot be parsed, OSError if it cannot be read."""
    path = Path(path)
    format = "json" if path.suffix.lower() == ".json" else "yaml"
    return parse_text(_decode(path.read_bytes(), str(path)), path.name, format)


def parse_stream(content: bytes, name: str) -> Any:
    """Parse JSON or YAML without a file name. Raises SpecError."""
    text = _decode(content, name)
    try:
        return parse_text(text, name, "json")  # first: YAML accepts escaped lone surrogates
    except SpecError:
        return parse_text(text, name, "yaml")


def _decode(content: bytes, name: str) -> str:
    for mark, encoding in _ENCODINGS:
        if content.startswith(mark):
            remedy = f"save it as UTF-8: iconv -f {encoding} -t UTF-8"
            rule = f"is {encoding} text, not UTF-8"
            raise spec_error("invalid_encoding", name, None, rule, remedy)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        rule = f"is not UTF-8 text at byte {error.start + 1}"
        raise spec_error("invalid_encoding", name, None, rule, "save it as UTF-8") from None


_PRESET_PARTS = (
    "TranslationModelSpec", "LanguageModelSpec", "MoESpec", "GroupedQueryAttentionSpec", "LatentAttentionSpec",
    "IndexerSpec", "GatedDeltaNetSpec", "Mamba2Spec", "ShortConvolutionSpec",
)  # fmt: skip
"""Parts whose required fields a preset may fill in."""


def json_schema(*, with_sweep: bool = False) -> dict[str, Any]:
    """JSON Schema of a job file, for editors; `with_sweep`: of one that makes a family of jobs."""
    schema = JobSpec.model_json_schema()
    if with_sweep:
        sweep = SweepSpec.model_json_schema()
        schema["$defs"] |= sweep.pop("$defs")
        schema["properties"]["sweep"] = sweep
        schema["required"] = [*schema["required"], "sweep"]
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Shardyard job"
    for part in _PRESET_PARTS:
        schema["$defs"][part].pop("required", None)
    kinds = schema["properties"]["model"].pop("oneOf")
    schema["properties"]["model"]["anyOf"] = kinds  # a preset alone may be of any kind
    parallel = schema["properties"]["parallel"]
    schema["properties"]["parallel"] = {
        "anyOf": [{"const": "auto"}, {"$ref": "#/$defs/ParallelSpec"}],
        "default": parallel.get("default", "auto"),
    }
    return schema
