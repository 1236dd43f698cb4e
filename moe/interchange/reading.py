"""Reading of a `config.json`, key by key, with the problems found."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from moe.spec import Problem, ProblemCode

REMEDY = "change config.json, or use another model"
_KINDS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


class Reading:
    """A config with its family's defaults and aliases. `path_of`: path of a key in errors."""

    def __init__(
        self,
        config: Mapping[str, Any],
        path_of: Callable[[str], str],
        defaults: Mapping[str, Any],
        aliases: Mapping[str, str],
    ) -> None:
        self.problems: list[Problem] = []
        self._path_of, self._defaults = path_of, defaults
        self._values = dict(config)
        names: dict[str, str] = {}
        for alias, key in aliases.items():
            if config.get(alias) is None:
                continue
            if self.has(key) and self._values[key] != config[alias]:
                rule = f"differs from {names.get(key, key)} (={self._values[key]!r}), its alias"
                self.refuse(alias, config[alias], rule, "remove one of them", code="conflict")
            self._values[key], names[key] = config[alias], alias

    def has(self, key: str) -> bool:
        """Whether a key is set and not null."""
        return self._values.get(key) is not None

    def raw(self, key: str) -> Any:
        """Value of a key, or its default; None if it has neither."""
        return self._values.get(key, self._defaults.get(key))

    def get(self, key: str, kind: type, *, null: Any = ...) -> Any:
        """Value of a key as `kind`, or its default; `null` is returned for null, if given."""
        if key not in self._values and key not in self._defaults:
            self.refuse(key, None, "is required", "add it to config.json", code="missing")
            return None
        value = self._values.get(key, self._defaults.get(key))
        if value is None and null is not ...:
            return null
        if value is None and kind is bool and key in self._values:
            return False  # null is falsy in transformers' code
        fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
        if not fits or (isinstance(value, bool) and kind is not bool):
            rule = f"must be {_KINDS[kind]}, not {value!r}"
            self.refuse(key, value, rule, "correct config.json", code="wrong_type")
            return None
        try:
            return kind(value)
        except OverflowError:
            rule = "is too large"
            self.refuse(key, None, rule, "correct config.json", code="out_of_range")
            return None

    def entries(self, key: str, number: int, allowed: Collection[str]) -> list[str] | None:
        """Entries of a list with one of the allowed words per layer; None, with a problem recorded, of anything
        else."""
        entries = self.raw(key)
        if isinstance(entries, list) and len(entries) == number and {*map(str, entries)} <= {*allowed}:
            return entries
        self.refuse(key, None, f"must be {number} of {' and '.join(sorted(allowed))}", code="invalid_value")
        return None

    def refuse(
        self, key: str, value: Any, rule: str, remedy: str = REMEDY, *, code: ProblemCode = "unsupported"
    ) -> None:
        """Record a problem with a key."""
        self.problems.append(Problem(code, self._path_of(key), value, rule, remedy))

    def only(self, key: str, allowed_values: Iterable[Any]) -> None:
        """Record a problem if a key has a value other than these; null counts as missing."""
        allowed_values = list(allowed_values)
        value = self._values.get(key)
        if value is not None and not any(json_equal(value, allowed_value) for allowed_value in allowed_values):
            choices = " or ".join(map(repr, allowed_values)) or "omitted"
            self.refuse(key, value, f"must be {choices}; nothing else is supported", REMEDY)


def json_equal(left: Any, right: Any) -> bool:
    """Whether two JSON values are equal: 0 equals 0.0 but not false."""
    return left == right and (type(left) is type(right) or (_is_number(left) and _is_number(right)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
