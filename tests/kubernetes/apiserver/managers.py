"""Owners of fields: server-side apply with its conflicts, and the owners of other writes."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.kubernetes.apiserver.failure import Failure
from tests.kubernetes.apiserver.fields import Path, decode, dotted, encode, is_item_key, leaves, merge, without
from tests.kubernetes.apiserver.schema import Schema

Object = dict[str, Any]

_UNOWNED = {
    ("f:apiVersion",),
    ("f:kind",),
    *(
        ("f:metadata", f"f:{name}")
        for name in (
            "name",
            "namespace",
            "uid",
            "resourceVersion",
            "creationTimestamp",
            "generation",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "managedFields",
            "selfLink",
        )
    ),
}


@dataclass
class Owner:
    """A manager's entry in `managedFields`."""

    manager: str
    operation: str
    subresource: str
    api_version: str
    time: str
    fields: set[Path] = field(default_factory=set)

    @property
    def identity(self) -> tuple[str, str, str]:
        return self.manager, self.operation, self.subresource

    def entry(self) -> Object:
        entry: Object = {"manager": self.manager, "operation": self.operation, "apiVersion": self.api_version}
        entry |= {"time": self.time, "fieldsType": "FieldsV1", "fieldsV1": encode(self.fields)}
        return entry | ({"subresource": self.subresource} if self.subresource else {})


def owners_of(value: Object) -> list[Owner]:
    return [
        Owner(e["manager"], e["operation"], e.get("subresource", ""), e["apiVersion"], e["time"], decode(e["fieldsV1"]))
        for e in value["metadata"].get("managedFields") or ()
    ]


def with_owners(value: Object, owners: list[Owner]) -> Object:
    entries = [owner.entry() for owner in owners if owner.fields]
    return {**value, "metadata": {**value["metadata"], "managedFields": entries}}


def owned_leaves(schema: Schema, value: Object) -> dict[Path, Any]:
    return {p: v for p, v in leaves(schema, value).items() if p[:1] not in _UNOWNED and p[:2] not in _UNOWNED}


def record_update(schema: Schema, old: Object, new: Object, *, manager: str, subresource: str) -> Object:
    """New object with this manager as the owner of what it changed."""
    before, after = owned_leaves(schema, old) if old else {}, owned_leaves(schema, new)
    changed = {path for path, value in after.items() if path not in before or before[path] != value}
    owners = owners_of(old) if old else []
    for owner in owners:
        owner.fields = (owner.fields - changed) & set(after)
    if changed:
        _owner(owners, manager, "Update", subresource, new["apiVersion"]).fields |= changed
    return with_owners(new, owners)


def apply(schema: Schema, live: Object, applied: Object, *, manager: str, subresource: str, force: bool) -> Object:
    """Live object after a server-side apply. Raises Failure (409) for fields of other managers with other values."""
    owners = owners_of(live)
    owner = _owner(owners, manager, "Apply", subresource, applied["apiVersion"])
    previous, owner.fields = owner.fields, set(owned_leaves(schema, applied))
    merged = merge(schema, live, applied)
    before, after = owned_leaves(schema, live), owned_leaves(schema, merged)
    changed = {path for path, value in after.items() if path not in before or before[path] != value}
    others = [other for other in owners if other is not owner]
    conflicts = [(other, path) for other in others for path in sorted(other.fields & changed & owner.fields)]
    if conflicts and not force:
        raise _conflict(conflicts)
    for other in others:
        other.fields -= changed
    for path in sorted(previous - owner.fields, key=len):  # an item goes before its fields
        if not is_item_key(path) and not any(_owns(other, path) for other in owners):
            merged = without(schema, merged, path)
    return with_owners(merged, owners)


def _owns(owner: Owner, path: Path) -> bool:
    return any(other[: len(path)] == path for other in owner.fields)


def _owner(owners: list[Owner], manager: str, operation: str, subresource: str, api_version: str) -> Owner:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for owner in owners:
        if owner.identity == (manager, operation, subresource):
            owner.time, owner.api_version = now, api_version
            return owner
    owners.append(Owner(manager, operation, subresource, api_version, now))
    return owners[-1]


def _conflict(conflicts: list[tuple[Owner, Path]]) -> Failure:
    words = {
        id(owner): f'"{owner.manager}"'
        + (f' with subresource "{owner.subresource}"' if owner.subresource else "")
        + (f" using {owner.api_version}" if owner.operation == "Update" else "")
        for owner, _ in conflicts
    }
    causes = [
        {"reason": "FieldManagerConflict", "message": f"conflict with {words[id(owner)]}", "field": dotted(path)}
        for owner, path in conflicts
    ]
    if len(causes) == 1:
        message = f"Apply failed with 1 conflict: {causes[0]['message']}: {causes[0]['field']}"
    else:
        lines = []
        for owner in {id(owner): owner for owner, _ in conflicts}.values():
            lines.append(f"conflicts with {words[id(owner)]}:")
            lines += [f"- {dotted(path)}" for other, path in conflicts if other is owner]
        message = f"Apply failed with {len(causes)} conflicts: " + "\n".join(lines)
    return Failure(409, "Conflict", message, causes=causes)
