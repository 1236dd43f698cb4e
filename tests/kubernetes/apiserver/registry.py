"""Writes of objects as kube-apiserver carries them out: admission, schemas, versions, owners of fields, deletion."""

import re
import uuid
from datetime import UTC, datetime
from typing import Any

from tests.kubernetes.apiserver import managers, patches
from tests.kubernetes.apiserver.definitions import Definition, core_definitions, custom_definitions
from tests.kubernetes.apiserver.failure import MODIFIED, Failure, conflict, invalid, not_found
from tests.kubernetes.apiserver.faults import Denial
from tests.kubernetes.apiserver.schema import complete, errors, unknown_fields
from tests.kubernetes.apiserver.store import Key, Store

Object = dict[str, Any]

FOREGROUND = "foregroundDeletion"
_NAME = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
_LABEL = re.compile(r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$")


class Registry:
    """Resources and their objects."""

    def __init__(self, store: Store, manifests: list[Object]) -> None:
        """`manifests` are the CustomResourceDefinitions to begin with; stored ones come on top."""
        self.store = store
        self.denials: list[Denial] = []
        self.definitions: dict[tuple[str, str, str], Definition] = {}
        self._serve(core_definitions())
        for manifest in manifests:
            self._serve(custom_definitions(manifest))
            crds = self.definitions["apiextensions.k8s.io", "v1", "customresourcedefinitions"]
            key = Key(crds.name, "", manifest["metadata"]["name"])
            if store.get(key) is None:
                store.write("ADDED", key, _established(manifest))

    def _serve(self, definitions: list[Definition]) -> None:
        for definition in definitions:
            self.definitions[definition.group, definition.version, definition.plural] = definition

    def definition(self, group: str, version: str, plural: str) -> Definition:
        """Raises Failure (404) for a resource that is not served."""
        definition = self.definitions.get((group, version, plural))
        if definition is None:
            raise Failure(404, "NotFound", "the server could not find the requested resource")
        return definition

    def get(self, definition: Definition, namespace: str, name: str) -> Object:
        value = self.store.get(Key(definition.name, namespace, name))
        if value is None:
            raise not_found(definition.plural, definition.group, name)
        return value

    def create(
        self, definition: Definition, namespace: str, value: Object, *, manager: str, strict: bool, dry: bool = False
    ) -> Object:
        value = self._decoded(definition, namespace, value, strict=strict)
        return self._create(definition, namespace, value, manager=manager, dry=dry)

    def _create(
        self, definition: Definition, namespace: str, value: Object, *, manager: str, dry: bool, owned: bool = False
    ) -> Object:
        metadata = dict(value["metadata"])
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
        name = str(metadata.get("name") or "")
        if definition.namespaced and self.store.get(Key("namespaces.", "", namespace)) is None:
            raise not_found("namespaces", "", namespace)
        if self.store.get(Key(definition.name, namespace, name)) is not None:
            qualified = f"{definition.plural}.{definition.group}" if definition.group else definition.plural
            message = f'{qualified} "{name}" already exists'
            raise Failure(409, "AlreadyExists", message, name=name, group=definition.group, kind=definition.plural)
        for field in ("resourceVersion", "deletionTimestamp", "managedFields" if not owned else ""):
            metadata.pop(field, None)
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": _now(), "generation": 1}
        if definition.namespaced:
            metadata["namespace"] = namespace
        value = {**value, "metadata": metadata}
        if definition.has_status:
            value.pop("status", None)
        if definition.kind == "Pod":
            value["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
        if not owned:
            value = managers.record_update(definition.schema, {}, value, manager=manager, subresource="")
        self._admit(definition, name, is_new=True)
        self._validate(definition, value, None)
        if definition.kind == "CustomResourceDefinition":
            self._serve(custom_definitions(value))
            value = _established(value)
        return value if dry else self.store.write("ADDED", Key(definition.name, namespace, name), value)

    def update(
        self,
        definition: Definition,
        namespace: str,
        name: str,
        value: Object,
        *,
        subresource: str = "",
        manager: str,
        strict: bool,
        dry: bool = False,
    ) -> Object:
        value = self._decoded(definition, namespace, value, strict=strict)
        old = self.get(definition, namespace, name)
        return self._replace(definition, old, value, subresource=subresource, manager=manager, dry=dry)

    def patch(
        self,
        definition: Definition,
        namespace: str,
        name: str,
        patch: Any,
        content_type: str,
        *,
        subresource: str = "",
        manager: str,
        strict: bool,
        force: bool = False,
        dry: bool = False,
    ) -> Object:
        if content_type == "application/apply-patch+yaml":
            return self._apply(definition, namespace, name, patch, subresource, manager, force=force, dry=dry)
        old = self.get(definition, namespace, name)
        if content_type == "application/merge-patch+json":
            value = patches.merge_patch(old, patch)
        elif content_type == "application/json-patch+json":
            value = patches.json_patch(old, patch)
        else:
            # Custom resources have no strategic merge on a real server either; ours has none for core kinds.
            message = "the body of the request was in an unknown format - accepted media types include: "
            message += "application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml"
            raise Failure(415, "UnsupportedMediaType", message)
        value = self._decoded(definition, namespace, value, strict=strict)
        return self._replace(definition, old, value, subresource=subresource, manager=manager, dry=dry)

    def _apply(
        self,
        definition: Definition,
        namespace: str,
        name: str,
        patch: Object,
        subresource: str,
        manager: str,
        *,
        force: bool,
        dry: bool,
    ) -> Object:
        if not manager:
            raise invalid(
                "PatchOptions", "meta.k8s.io", "", [("fieldManager", "Required value: is required for apply")]
            )
        if patch.get("metadata", {}).get("managedFields"):
            raise Failure(400, "BadRequest", "metadata.managedFields must be nil")
        if unknown := unknown_fields(definition.schema, patch):
            # A plain error, which is answered with 500 and no reason: kubernetes issue 118877.
            where = f"{namespace}/{name}; {definition.api_version}, Kind={definition.kind}"
            lines = [f".{field}: field not declared in schema" for field in unknown]
            text = lines[0] if len(lines) == 1 else "errors:\n  " + "\n  ".join(lines)
            raise Failure(500, "", f"failed to create typed patch object ({where}): {text}")
        patch = {**patch, "metadata": {**patch.get("metadata", {}), "name": name}}
        live = self.store.get(Key(definition.name, namespace, name))
        base = live or {"apiVersion": definition.api_version, "kind": definition.kind, "metadata": {"name": name}}
        if live is not None and patch["metadata"].get("resourceVersion") not in (
            None,
            live["metadata"]["resourceVersion"],
        ):
            raise conflict(definition.plural, definition.group, name, MODIFIED)
        value = managers.apply(definition.schema, base, patch, manager=manager, subresource=subresource, force=force)
        value = complete(definition.schema, value)
        if live is None:
            return self._create(definition, namespace, value, manager=manager, dry=dry, owned=True)
        return self._replace(definition, live, value, subresource=subresource, manager=manager, dry=dry, owned=True)

    def _replace(
        self,
        definition: Definition,
        old: Object,
        value: Object,
        *,
        subresource: str,
        manager: str,
        dry: bool,
        owned: bool = False,
    ) -> Object:
        name = old["metadata"]["name"]
        metadata = dict(value["metadata"])
        if metadata.get("uid") not in (None, "", old["metadata"]["uid"]):
            message = f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object meta: "
            raise conflict(definition.plural, definition.group, name, message + old["metadata"]["uid"])
        if metadata.get("resourceVersion") not in (None, "", old["metadata"]["resourceVersion"]):
            raise conflict(definition.plural, definition.group, name, MODIFIED)
        if subresource == "status":
            entries = metadata.get("managedFields")
            value = {**old, "status": value.get("status", {})}
            if owned:
                value["metadata"] = {**old["metadata"], "managedFields": entries}
        elif definition.has_status:
            value = {**value, "status": old["status"]} if "status" in old else _without_status(value)
        if subresource != "status":
            fixed = ("uid", "creationTimestamp", "deletionTimestamp", "generation", "namespace", "name")
            fixed_fields = {field: old["metadata"][field] for field in fixed if field in old["metadata"]}
            entries = {} if owned else {"managedFields": old["metadata"].get("managedFields", [])}
            value = {**value, "metadata": {**metadata, **fixed_fields, **entries}}
            if _spec(value) != _spec(old):
                value["metadata"]["generation"] = old["metadata"].get("generation", 1) + 1
        value["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]
        if not owned:
            value = managers.record_update(definition.schema, old, value, manager=manager, subresource=subresource)
        self._admit(definition, name, is_new=False)
        self._validate(definition, value, old)
        if _content(value) == _content(old):
            return old  # a write without a change has no version
        key = Key(definition.name, old["metadata"].get("namespace", ""), name)
        if dry:
            return value
        if value["metadata"].get("deletionTimestamp") and not value["metadata"].get("finalizers"):
            return self.store.write("DELETED", key, value)
        return self.store.write("MODIFIED", key, value)

    def delete(
        self, definition: Definition, namespace: str, name: str, options: Object, *, dry: bool = False
    ) -> Object:
        """Mark the object for deletion, or delete it if nothing holds it. Dependents are the collector's."""
        old = self.get(definition, namespace, name)
        for field, value in (options.get("preconditions") or {}).items():
            if value != old["metadata"][field]:
                word = "UID" if field == "uid" else "ResourceVersion"
                message = f"Precondition failed: {word} in precondition: {value}, {word} in object meta: "
                raise conflict(definition.plural, definition.group, name, message + old["metadata"][field])
        metadata = dict(old["metadata"])
        finalizers = list(metadata.get("finalizers") or [])
        if options.get("propagationPolicy") == "Foreground" and FOREGROUND not in finalizers:
            finalizers.append(FOREGROUND)
        if options.get("propagationPolicy") == "Orphan":
            self._orphan(old["metadata"]["uid"])
        if dry:
            return old
        key = Key(definition.name, namespace, name)
        if not finalizers:
            return self.store.write("DELETED", key, old)
        if metadata.get("deletionTimestamp") and finalizers == metadata.get("finalizers"):
            return old
        metadata |= {"finalizers": finalizers, "deletionTimestamp": metadata.get("deletionTimestamp") or _now()}
        return self.store.write("MODIFIED", key, {**old, "metadata": metadata})

    def _orphan(self, uid: str) -> None:
        for key in self.store.dependents(uid):
            value = self.store.get(key)
            assert value is not None
            owners = [o for o in value["metadata"]["ownerReferences"] if o["uid"] != uid]
            metadata = {**value["metadata"], "ownerReferences": owners}
            self.store.write("MODIFIED", key, {**value, "metadata": metadata})

    def collect_garbage(self) -> bool:
        """Delete objects whose owners are gone, and finish deletions in the foreground; return whether any was."""
        uids = {value["metadata"]["uid"] for key in self.store.all_keys() if (value := self.store.get(key)) is not None}
        collected = False
        for key in self.store.all_keys():
            value = self.store.get(key)
            if value is None:
                continue
            owners = value["metadata"].get("ownerReferences") or []
            if owners and not any(owner["uid"] in uids for owner in owners):
                collected |= self._collect(key, value)
            if FOREGROUND in (value["metadata"].get("finalizers") or []):
                collected |= self._finish_foreground(key, value)
        return collected

    def _collect(self, key: Key, value: Object) -> bool:
        if not value["metadata"].get("finalizers"):
            self.store.write("DELETED", key, value)
            return True
        if value["metadata"].get("deletionTimestamp"):
            return False
        self.store.write("MODIFIED", key, {**value, "metadata": {**value["metadata"], "deletionTimestamp": _now()}})
        return True

    def _finish_foreground(self, key: Key, value: Object) -> bool:
        dependents = [(k, self.store.get(k)) for k in self.store.dependents(value["metadata"]["uid"])]
        collected = False
        blocking = 0
        for dependent_key, dependent in dependents:
            if dependent is None:
                continue
            collected |= self._collect(dependent_key, dependent)
            owners = dependent["metadata"]["ownerReferences"]
            still_there = self.store.get(dependent_key) is not None
            blocking += still_there and any(o.get("blockOwnerDeletion") for o in owners)
        if blocking:
            return collected
        finalizers = [f for f in value["metadata"]["finalizers"] if f != FOREGROUND]
        value = {**value, "metadata": {**value["metadata"], "finalizers": finalizers}}
        self.store.write("MODIFIED" if finalizers else "DELETED", key, value)
        return True

    def _decoded(self, definition: Definition, namespace: str, value: Object, *, strict: bool) -> Object:
        """Value by its schema. Raises Failure (400) for another kind or place, and if `strict` for unknown fields."""
        if not isinstance(value, dict) or not isinstance(value.get("metadata", {}), dict):
            raise Failure(400, "BadRequest", "the object provided is unrecognized (must be of type object)")
        kind, api_version = value.get("kind", definition.kind), value.get("apiVersion", definition.api_version)
        if (kind, api_version) != (definition.kind, definition.api_version):
            message = f"the API version in the data ({api_version}) does not match the expected API version"
            raise Failure(400, "BadRequest", f"{message} ({definition.api_version})")
        place = value.get("metadata", {}).get("namespace")
        if definition.namespaced and place not in (None, namespace):
            message = "the namespace of the provided object does not match the namespace sent on the request"
            raise Failure(400, "BadRequest", message)
        if strict and (unknown := unknown_fields(definition.schema, value)):
            text = ", ".join(f'unknown field "{field}"' for field in unknown)
            message = f"strict decoding error: {text}"
            if not definition.is_custom:
                kind, version = definition.kind, definition.version
                message = f'{kind} in version "{version}" cannot be handled as a {kind}: {message}'
            raise Failure(400, "BadRequest", message)
        value = complete(definition.schema, value)
        return {"apiVersion": definition.api_version, "kind": definition.kind, "metadata": {}, **value}

    def _admit(self, definition: Definition, name: str, *, is_new: bool) -> None:
        for denial in self.denials if is_new else [denial for denial in self.denials if denial.webhook]:
            denial.check(definition.plural, definition.group, name)

    def _validate(self, definition: Definition, value: Object, old: Object | None) -> None:
        causes = [*_metadata_errors(value["metadata"]), *errors(definition.schema, value, old)]
        if definition.kind == "PersistentVolumeClaim" and old is not None and _claim(value) != _claim(old):
            message = "Forbidden: spec is immutable after creation except resources.requests"
            causes.append(("spec", f"{message} and volumeAttributesClassName for bound claims"))
        if causes:
            raise invalid(definition.kind, definition.group, value["metadata"].get("name", ""), causes)


def _metadata_errors(metadata: Object) -> list[tuple[str, str]]:
    causes = []
    name = metadata.get("name") or ""
    if not name:
        causes.append(("metadata.name", "Required value: name or generateName is required"))
    elif len(name) > 253 or not _NAME.match(name):
        rule = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.'"
        causes.append(("metadata.name", f'Invalid value: "{name}": {rule}'))
    for label, text in (metadata.get("labels") or {}).items():
        if len(text) > 63:
            causes.append(("metadata.labels", f'Invalid value: "{text}": must be no more than 63 bytes'))
        elif not _LABEL.match(text):
            rule = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.'"
            causes.append(("metadata.labels", f'Invalid value: "{text}": {rule}'))
        if len(label.rpartition("/")[2]) > 63:
            causes.append(("metadata.labels", f'Invalid value: "{label}": name part must be no more than 63 bytes'))
    if sum(len(k) + len(v) for k, v in (metadata.get("annotations") or {}).items()) > 256 * 1024:
        causes.append(("metadata.annotations", "Too long: may not be more than 262144 bytes"))
    return causes


def _claim(value: Object) -> Object:
    return {k: v for k, v in (value.get("spec") or {}).items() if k not in ("resources", "volumeName")}


def _spec(value: Object) -> Object:
    return {k: v for k, v in value.items() if k not in ("metadata", "status")}


def _content(value: Object) -> Object:
    """Object without what every write changes."""
    metadata = {k: v for k, v in value["metadata"].items() if k not in ("resourceVersion", "managedFields")}
    entries = [{k: v for k, v in e.items() if k != "time"} for e in value["metadata"].get("managedFields") or ()]
    return {**value, "metadata": {**metadata, "managedFields": entries}}


def _without_status(value: Object) -> Object:
    return {k: v for k, v in value.items() if k != "status"}


def _established(manifest: Object) -> Object:
    conditions = [{"type": "Established", "status": "True", "reason": "InitialNamesAccepted"}]
    metadata = {"uid": str(uuid.uuid4()), "creationTimestamp": _now(), **manifest["metadata"]}
    return {**manifest, "metadata": metadata, "status": {"conditions": conditions}}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
