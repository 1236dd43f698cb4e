"""Base class of records: frozen values written as JSON and read by any release."""

from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_READERS: "dict[type, TypeAdapter[Any]]" = {}
"""By record class, created on first read."""


class JsonRecord:
    """Frozen dataclass whose fields, in order, are its JSON keys.

    Plain dataclasses, since each step creates one per layer with all expert loads, and values computed here need no
    validation. `read` validates values from storage or the network.
    """

    @classmethod
    def read(cls, plain: object) -> Self:
        """Record from parsed JSON of any release.

        Ignores unknown keys; missing or mistyped values get their defaults. Raises ValueError without a default.
        """
        from pydantic import TypeAdapter, ValidationError  # clients that read no records do not need it

        fields = plain if isinstance(plain, dict) else {}
        reader = _READERS.get(cls) or _READERS.setdefault(cls, TypeAdapter(cls))
        try:
            record: Self = reader.validate_python(fields)
        except ValidationError as error:
            unreadable = {problem["loc"][0] for problem in error.errors(include_input=False)}
            readable = {key: value for key, value in fields.items() if key not in unreadable}
            record = reader.validate_python(readable)
        return record

    def to_plain(self) -> dict[str, Any]:
        """JSON value. Fields that are None by default are omitted if None."""
        return {
            name: _plain(value)
            for name, value in vars(self).items()
            if value is not None or getattr(type(self), name, ...) is not None
        }


def _plain(value: Any) -> Any:
    if isinstance(value, JsonRecord):
        return value.to_plain()
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        if value and isinstance(value[0], JsonRecord):
            return [record.to_plain() for record in value]
        return list(value)  # possibly the loads of thousands of experts
    return value
