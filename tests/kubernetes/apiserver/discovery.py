"""Discovery documents, by which kubectl learns what the server serves."""

from typing import Any

from tests.kubernetes.apiserver.definitions import Definition

Object = dict[str, Any]

_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
VERSION = {"major": "1", "minor": "37", "gitVersion": "v1.37.0", "platform": "linux/amd64"}


def document(path: str, definitions: list[Definition]) -> Object | None:
    """Document at a path; None if there is none."""
    parts = path.strip("/").split("/")
    groups = sorted({d.group for d in definitions if d.group})
    if path == "/version":
        return VERSION
    if path in ("/api", "/api/"):
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if path in ("/apis", "/apis/"):
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(g, definitions) for g in groups]}
    if parts[0] == "apis" and len(parts) == 2 and parts[1] in groups:
        return {"kind": "APIGroup", "apiVersion": "v1", **_group(parts[1], definitions)}
    if path == "/api/v1":
        return _resources("", "v1", definitions)
    if parts[0] == "apis" and len(parts) == 3:
        return _resources(parts[1], parts[2], definitions)
    if path == "/openapi/v3":
        versions = sorted({_version_path(d) for d in definitions})
        return {"paths": {v: {"serverRelativeURL": f"/openapi/v3/{v}?hash=0"} for v in versions}}
    if path.startswith("/openapi/v3/"):
        return _openapi(path.removeprefix("/openapi/v3/"), definitions)
    return None


def _version_path(definition: Definition) -> str:
    return f"apis/{definition.group}/{definition.version}" if definition.group else "api/v1"


def _group(group: str, definitions: list[Definition]) -> Object:
    versions = sorted({d.version for d in definitions if d.group == group})
    entries = [{"groupVersion": f"{group}/{version}", "version": version} for version in versions]
    return {"name": group, "versions": entries, "preferredVersion": entries[0]}


def _resources(group: str, version: str, definitions: list[Definition]) -> Object | None:
    resources = []
    for d in definitions:
        if (d.group, d.version) != (group, version):
            continue
        entry = {"name": d.plural, "singularName": d.kind.lower(), "namespaced": d.namespaced, "kind": d.kind}
        resources.append({**entry, "verbs": _VERBS})
        if d.has_status:
            resources.append({**entry, "name": f"{d.plural}/status", "verbs": ["get", "patch", "update"]})
    if not resources:
        return None
    group_version = f"{group}/{version}" if group else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": resources}


def _openapi(version_path: str, definitions: list[Definition]) -> Object | None:
    """Paths with the parameters that say that the server validates fields itself."""
    paths = {}
    for d in definitions:
        if _version_path(d) != version_path:
            continue
        prefix = f"/{version_path}" + ("/namespaces/{namespace}" if d.namespaced else "")
        operation = {
            "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
            "x-kubernetes-group-version-kind": {"group": d.group, "version": d.version, "kind": d.kind},
            "responses": {"200": {"description": "OK"}},
        }
        paths[f"{prefix}/{d.plural}/{{name}}"] = {"patch": operation}
    if not paths:
        return None
    info = {"title": "Kubernetes", "version": VERSION["gitVersion"]}
    return {"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": {}}}
