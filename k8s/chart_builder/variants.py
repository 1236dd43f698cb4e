"""Values of one field with and without each feature, and the decision which template statement they need."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from k8s.chart_builder.features import Feature

ABSENT: Any = object()
"""Value of a field that a variant lacks."""


@dataclass(frozen=True)
class Change:
    """Values of one field in the objects with a feature, and in those that it changes."""

    feature: Feature
    before: Any
    after: Any

    @property
    def is_one(self) -> bool:
        return not _same(self.before, self.after)


@dataclass(frozen=True)
class Variants:
    """One field in all variants."""

    base: Any
    changes: tuple[Change, ...] = ()

    @classmethod
    def of(cls, base: Any, changes: tuple[Change, ...]) -> "Variants":
        return cls(base, tuple(change for change in changes if change.is_one))

    def child(self, key: str) -> "Variants":
        """The variants of one key of mappings, or of one item of lists."""
        changes = tuple(
            Change(change.feature, _get(change.before, key), _get(change.after, key)) for change in self.changes
        )
        return Variants.of(_get(self.base, key), changes)

    def field_keys(self) -> list[str]:
        """Keys of all variants, in the order of the first that has them."""
        values = [self.base, *(value for change in self.changes for value in (change.before, change.after))]
        return list(dict.fromkeys(key for value in values if value is not ABSENT for key in keys_of(value)))

    @property
    def introduction(self) -> Change | None:
        """The one feature that adds the field, if the base lacks it and all other changes are made upon it."""
        if self.base is not ABSENT or not self.changes:
            return None
        first, *others = self.changes
        is_alone = first.before is ABSENT and all(
            change.before is not ABSENT and first.feature.component in change.feature.upon for change in others
        )
        return first if is_alone else None

    @property
    def removals(self) -> list[Change]:
        """Changes that remove the field."""
        return [change for change in self.changes if change.after is ABSENT]

    def without(self, *removed: Change) -> "Variants":
        return Variants(self.base, tuple(change for change in self.changes if change not in removed))

    @property
    def is_mergeable(self) -> bool:
        """Whether all variants are mappings, or all are lists."""
        values = [self.base, *(value for change in self.changes for value in (change.before, change.after))]
        return all(isinstance(value, dict) for value in values) or all(isinstance(value, list) for value in values)


def keys_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    elif isinstance(value, list):
        yield from map(item_key, value)


def item_key(item: Any) -> str:
    """Identity of a list's item: what Kubernetes merges lists by, or the item itself."""
    if not isinstance(item, dict):
        return repr(item)
    return str(item.get("name") or item.get("mountPath") or item.get("groupName") or item)


def _get(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return value.get(key, ABSENT)
    if isinstance(value, list):
        return next((item for item in value if item_key(item) == key), ABSENT)
    return ABSENT


def _same(one: Any, other: Any) -> bool:
    return one is other if ABSENT in (one, other) else bool(one == other)
