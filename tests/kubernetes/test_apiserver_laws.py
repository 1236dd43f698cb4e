"""Laws of the tests' API server, without its process: versions, field sets, server-side apply, selectors."""

import copy
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kubernetes.apiserver import managers
from tests.kubernetes.apiserver.failure import Failure
from tests.kubernetes.apiserver.fields import decode, encode, leaves
from tests.kubernetes.apiserver.patches import json_patch, merge_patch
from tests.kubernetes.apiserver.schema import complete, errors, unknown_fields
from tests.kubernetes.apiserver.selectors import matches_fields, matches_labels
from tests.kubernetes.apiserver.store import Key, Store

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {
            "properties": {
                "name": {"type": "string"},
                "labels": {"additionalProperties": {"type": "string"}},
                "managedFields": {"items": {}},
            }
        },
        "spec": {
            "type": "object",
            "properties": {
                "size": {"type": "integer", "minimum": 0},
                "mode": {"type": "string", "default": "fast", "enum": ["fast", "slow"]},
                "selector": {"additionalProperties": {"type": "string"}, "x-kubernetes-map-type": "atomic"},
                "command": {"type": "array", "items": {"type": "string"}},
                "tags": {"type": "array", "items": {"type": "string"}, "x-kubernetes-list-type": "set"},
                "parts": {
                    "type": "array",
                    "x-kubernetes-list-type": "map",
                    "x-kubernetes-list-map-keys": ["name"],
                    "items": {
                        "required": ["name"],
                        "properties": {"name": {"type": "string"}, "image": {"type": "string"}},
                    },
                },
            },
        },
    },
}
WORDS = st.sampled_from(["a", "b", "c"])
MAPS = st.dictionaries(WORDS, WORDS, min_size=1, max_size=2)
PARTS = st.lists(
    st.fixed_dictionaries({"name": WORDS}, optional={"image": WORDS}), unique_by=lambda part: part["name"], min_size=1
)
SPECS = st.fixed_dictionaries(
    {},
    optional={
        "size": st.integers(0, 3),
        "selector": MAPS,
        "command": st.lists(WORDS, min_size=1, max_size=2),
        "tags": st.lists(WORDS, unique=True, min_size=1),
        "parts": PARTS,
    },
)
OBJECTS = st.builds(
    lambda spec, labels: {
        "apiVersion": "v1",
        "kind": "Thing",
        "metadata": {"name": "x", "labels": labels},
        "spec": spec,
    },
    SPECS.filter(bool),
    MAPS,
)
NEW = {"apiVersion": "v1", "kind": "Thing", "metadata": {"name": "x"}}


def apply(live: Any, applied: Any, manager: str, *, force: bool = True) -> Any:
    return managers.apply(SCHEMA, live, copy.deepcopy(applied), manager=manager, subresource="", force=force)


def content(value: Any) -> Any:
    metadata = {k: v for k, v in value["metadata"].items() if k != "managedFields"}
    return {**value, "metadata": metadata}


@given(OBJECTS)
def test_a_field_set_survives_its_encoding(value: Any) -> None:
    paths = set(leaves(SCHEMA, value))
    assert decode(json.loads(json.dumps(encode(paths)))) == paths


@given(OBJECTS, OBJECTS)
def test_an_apply_has_its_values_and_its_repetition_changes_nothing(first: Any, second: Any) -> None:
    live = apply(apply(NEW, first, "one"), second, "two")
    assert managers.owned_leaves(SCHEMA, second).items() <= managers.owned_leaves(SCHEMA, live).items()
    assert content(apply(live, second, "two")) == content(live)


@given(OBJECTS, OBJECTS)
def test_what_a_manager_alone_applied_and_leaves_out_goes(first: Any, second: Any) -> None:
    live = apply(apply(NEW, first, "one"), second, "one")
    assert managers.owned_leaves(SCHEMA, live) == managers.owned_leaves(SCHEMA, second)


@given(OBJECTS, OBJECTS)
def test_without_force_an_apply_changes_nothing_of_another_manager(first: Any, second: Any) -> None:
    live = apply(NEW, first, "one")
    owned, wanted = managers.owned_leaves(SCHEMA, first), managers.owned_leaves(SCHEMA, second)
    differs = any(path in wanted and wanted[path] != value for path, value in owned.items())
    if differs:
        with pytest.raises(Failure) as refusal:
            apply(live, second, "two", force=False)
        assert refusal.value.code == 409
    else:
        after = managers.owned_leaves(SCHEMA, apply(live, second, "two", force=False))
        assert owned.items() <= after.items()


@given(OBJECTS, OBJECTS)
def test_every_leaf_has_an_owner_after_an_update(first: Any, second: Any) -> None:
    created = managers.record_update(SCHEMA, {}, first, manager="one", subresource="")
    updated = managers.record_update(SCHEMA, created, second, manager="two", subresource="")
    owned = [owner.fields for owner in managers.owners_of(updated)]
    assert set().union(*owned) == set(managers.owned_leaves(SCHEMA, second))
    assert sum(map(len, owned)) == len(set().union(*owned)), "a field of an update has one owner"


KEYS = st.sampled_from([Key("pods.", "n", name) for name in "abc"])


@given(st.lists(st.tuples(KEYS, st.sampled_from(["put", "delete"])), max_size=12), st.data())
def test_the_store_shows_every_version_since_its_compaction(writes: list[Any], data: st.DataObject) -> None:
    store, versions = Store(), [{}]
    for number, (key, action) in enumerate(writes):
        current = dict(versions[-1])
        old = store.get(key)
        if action == "delete" and old is None:
            continue
        value = {"metadata": {"name": key.name}, "number": number}
        if action == "delete":
            store.write("DELETED", key, value)
            current.pop(key)
        else:
            current[key] = store.write("MODIFIED" if old else "ADDED", key, value)
        versions.append(current)
    store.compact(data.draw(st.integers(0, store.version)))
    for version, expected in enumerate(versions):
        if version >= store.compacted:
            assert store.collection("pods.", "", version) == [expected[key] for key in sorted(expected)]
            assert [change.version for change in store.changes(version)] == list(range(version + 1, store.version + 1))
        else:
            with pytest.raises(Failure):
                store.changes(version)


def test_a_store_survives_a_write_that_was_cut_off(tmp_path: Path) -> None:
    path, key = tmp_path / "store", Key("pods.", "n", "a")
    with closing(Store(path)) as store:
        written = store.write("ADDED", key, {"metadata": {"name": "a"}})
    with path.open("ab") as file:
        file.write(b'{"type": "DELETED", "key": ["po')
    with closing(Store(path)) as store:
        assert (store.version, store.get(key)) == (1, written)
        store.write("DELETED", key, written)
    with closing(Store(path)) as store:
        assert store.get(key) is None


@pytest.mark.parametrize(
    ("selector", "matches"),
    [
        ("", True),
        ("a=1", True),
        ("a==1,b=2", True),
        ("a!=1", False),
        ("a in (1, 3),b notin (1)", True),
        ("a in (2)", False),
        ("a", True),
        ("!a", False),
        ("!c", True),
        ("c!=1", True),
    ],
)
def test_label_selectors(selector: str, matches: bool) -> None:
    assert matches_labels({"metadata": {"labels": {"a": "1", "b": "2"}}}, selector) is matches


def test_field_selectors() -> None:
    value = {"metadata": {"name": "a"}, "type": "Warning", "involvedObject": {"uid": "u"}}
    assert matches_fields(value, "type=Warning,involvedObject.uid=u")
    assert not matches_fields(value, "type!=Warning")


def test_merge_patches_of_rfc_7396() -> None:
    value = {"a": "b", "c": {"d": "e", "f": "g"}}
    assert merge_patch(value, {"a": "z", "c": {"f": None}}) == {"a": "z", "c": {"d": "e"}}
    assert merge_patch([1], {"a": {"b": None}}) == {"a": {}}


def test_json_patches_of_rfc_6902() -> None:
    value = {"a": [1, 3], "b/c": 1}
    operations = [
        {"op": "test", "path": "/b~1c", "value": 1},
        {"op": "add", "path": "/a/1", "value": 2},
        {"op": "move", "from": "/b~1c", "path": "/d"},
        {"op": "copy", "from": "/a/0", "path": "/a/-"},
        {"op": "replace", "path": "/a/0", "value": 0},
    ]
    assert json_patch(value, operations) == {"a": [0, 2, 3, 1], "d": 1}
    with pytest.raises(Failure, match="422"):
        json_patch(value, [{"op": "test", "path": "/a", "value": []}])


def test_schemas_prune_complete_and_refuse() -> None:
    value = {"spec": {"size": -1, "mode": "odd", "parts": [{"image": "i", "imagee": "j"}], "tags": "a"}, "extra": 1}
    assert unknown_fields(SCHEMA, value) == ["extra", "spec.parts[0].imagee"]
    assert complete(SCHEMA, {"spec": {"parts": [{"name": "a", "b": 1}]}, "extra": 1}) == {
        "spec": {"parts": [{"name": "a"}], "mode": "fast"}
    }
    assert [field for field, _ in errors(SCHEMA, value)] == [
        "spec.size",
        "spec.mode",
        "spec.parts[0].name",
        "spec.tags",
    ]
