"""The base of records: frozen values that leave as JSON and may be read by another release."""

from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_READERS: "dict[type, TypeAdapter[Any]]" = {}
"""By kind of record, made when the first of a kind is read."""


class JsonRecord:
    """A frozen dataclass whose fields, in their order, are the keys of its JSON.

    Plain dataclasses: a step makes one for each layer, with all loads, and what we have made needs no validation. What
    comes from storage or the network is validated when it is read.
    """

    @classmethod
    def read(cls, plain: object) -> Self:
        """The record of parsed JSON, whichever release wrote it. Unknown keys are passed over; one that is missing, or
        whose value is of another type, has its default. Raises ValueError where it has none."""
        from pydantic import TypeAdapter, ValidationError  # which a client that reads no record does without

        fields = plain if isinstance(plain, dict) else {}
        reader = _READERS.get(cls) or _READERS.setdefault(cls, TypeAdapter(cls))
        try:
            record: Self = reader.validate_python(fields)
        except ValidationError as error:
            unreadable = {problem["loc"][0] for problem in error.errors(include_input=False)}
            left = {key: value for key, value in fields.items() if key not in unreadable}
            record = reader.validate_python(left)
        return record

    def to_plain(self) -> dict[str, Any]:
        """Its JSON as Python has it. A field whose default is None is left out where it is None."""
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
        return list(value)  # perhaps the loads of thousands of experts
    return value
