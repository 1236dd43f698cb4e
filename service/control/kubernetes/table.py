"""Objects of one resource by name, submission, owner and the object that an event is about."""

from collections.abc import Iterator

from service.control.kubernetes.resource import Object
from service.control.kubernetes.watched import submission_of


class Table:
    """Objects of one collection with indexes. Not thread-safe."""

    def __init__(self, most_per_object: int | None = None) -> None:
        self._most_per_object = most_per_object
        self._objects: dict[str, Object] = {}
        self._indexes: dict[tuple[str, str], dict[str, Object]] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, name: str) -> bool:
        return name in self._objects

    def names(self) -> set[str]:
        return set(self._objects)

    def get(self, name: str) -> Object | None:
        return self._objects.get(name)

    def all(self) -> tuple[Object, ...]:
        return tuple(self._objects.values())

    def by_submission(self, submission: str) -> tuple[Object, ...]:
        return tuple(self._indexes.get(("submission", submission), {}).values())

    def by_owner(self, uid: str) -> tuple[Object, ...]:
        return tuple(self._indexes.get(("owner", uid), {}).values())

    def by_involved_object(self, uid: str) -> tuple[Object, ...]:
        return tuple(self._indexes.get(("involved", uid), {}).values())

    def put(self, value: Object) -> None:
        """Add or replace an object; beyond `most_per_object`, the oldest event of its object goes."""
        name = value["metadata"]["name"]
        self.remove(name)
        self._objects[name] = value
        for key in _keys(value):
            entries = self._indexes.setdefault(key, {})
            entries[name] = value
            if key[0] == "involved" and self._most_per_object is not None and len(entries) > self._most_per_object:
                self.remove(next(iter(entries)))

    def remove(self, name: str) -> Object | None:
        """Remove the object of this name and return it, if there was one."""
        value = self._objects.pop(name, None)
        if value is not None:
            for key in _keys(value):
                entries = self._indexes[key]
                del entries[name]
                if not entries:
                    del self._indexes[key]
        return value


def _keys(value: Object) -> Iterator[tuple[str, str]]:
    if submission := submission_of(value):
        yield "submission", submission
    for owner in value["metadata"].get("ownerReferences") or ():
        yield "owner", owner["uid"]
    if uid := (value.get("involvedObject") or {}).get("uid"):
        yield "involved", uid
