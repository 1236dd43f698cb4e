"""Resources that the server serves: core kinds with kube-apiserver's own schemas, and custom ones by definition."""

import json
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from tests.kubernetes.apiserver.schema import Schema

_VERSION = "v1.37.0-local-strict"
_DROPPED = ("description", "example", "title")


@dataclass(frozen=True)
class Definition:
    """A served resource."""

    group: str
    version: str
    plural: str
    kind: str
    schema: Schema = field(repr=False, hash=False)
    namespaced: bool = True
    has_status: bool = False
    is_custom: bool = False

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def name(self) -> str:
        """Name in keys of the store."""
        return f"{self.plural}.{self.group}"


_CORE = (
    ("v1", "pods", "Pod", "io.k8s.api.core.v1.Pod", True, True),
    ("v1", "events", "Event", "io.k8s.api.core.v1.Event", True, False),
    ("v1", "services", "Service", "io.k8s.api.core.v1.Service", True, True),
    ("v1", "configmaps", "ConfigMap", "io.k8s.api.core.v1.ConfigMap", True, False),
    ("v1", "persistentvolumeclaims", "PersistentVolumeClaim", "io.k8s.api.core.v1.PersistentVolumeClaim", True, True),
    ("v1", "namespaces", "Namespace", "io.k8s.api.core.v1.Namespace", False, True),
)
_METADATA = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
_CRD = "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.CustomResourceDefinition"


def core_definitions() -> list[Definition]:
    definitions = [
        Definition("", version, plural, kind, _core_schema(name), namespaced=namespaced, has_status=has_status)
        for version, plural, kind, name, namespaced, has_status in _CORE
    ]
    # Definitions are recursive: their own schema is not enforced.
    schema: Schema = {"type": "object", "properties": {"metadata": _core_schema(_METADATA)}}
    schema["x-kubernetes-preserve-unknown-fields"] = True
    crd = Definition(
        "apiextensions.k8s.io",
        "v1",
        "customresourcedefinitions",
        "CustomResourceDefinition",
        schema,
        namespaced=False,
        has_status=True,
    )
    return [*definitions, crd]


def custom_definitions(manifest: dict[str, Any]) -> list[Definition]:
    """Served versions of a CustomResourceDefinition."""
    spec, names = manifest["spec"], manifest["spec"]["names"]
    definitions = []
    for version in spec["versions"]:
        if not version["served"]:
            continue
        schema = _plain(version["schema"]["openAPIV3Schema"])
        schema["properties"] = {
            **schema.get("properties", {}),
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": _core_schema(_METADATA),
        }
        definitions.append(
            Definition(
                spec["group"],
                version["name"],
                names["plural"],
                names["kind"],
                schema,
                namespaced=spec["scope"] == "Namespaced",
                has_status="status" in (version.get("subresources") or {}),
                is_custom=True,
            )
        )
    return definitions


def load_manifests(path: Path, cache_dir: Path | None = None) -> list[dict[str, Any]]:
    """Manifests of a YAML file, read once: KubeRay's take more than a second."""
    cached = cache_dir / f"{path.name}-{path.stat().st_mtime_ns}.json" if cache_dir is not None else None
    if cached is not None and cached.exists():
        return list(json.loads(cached.read_text()))
    manifests = [m for m in yaml.load_all(path.read_text(), Loader=yaml.CSafeLoader) if m]
    for manifest in manifests:
        if manifest.get("kind") == "CustomResourceDefinition":
            manifest["spec"]["versions"] = [_plain(v) for v in manifest["spec"]["versions"] if v["name"] != "v1alpha1"]
    if cached is not None:
        partial = cached.with_suffix(".partial")
        partial.write_text(json.dumps(manifests))
        partial.rename(cached)
    return manifests


@cache
def _published() -> dict[str, Any]:
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / _VERSION
    return dict(json.loads((folder / "_definitions.json").read_text())["$defs"])


@cache
def _core_schema(name: str) -> Schema:
    return _resolved(_published()[name])


def _resolved(schema: Schema) -> Schema:
    if "$ref" in schema:
        return _core_schema(schema["$ref"].rpartition("/")[2])
    result: Schema = {}
    for key, value in schema.items():
        if key in _DROPPED:
            continue
        if key == "properties":
            result[key] = {name: _resolved(subschema) for name, subschema in value.items()}
        elif key == "items" or (key == "additionalProperties" and isinstance(value, dict)):
            result[key] = _resolved(value)
        elif key == "enum":
            result[key] = [option for option in value if option is not None]
        elif key != "additionalProperties":
            result[key] = value
    if {"int-or-string", "quantity"} & {schema.get("format")} or "oneOf" in result:
        return {"x-kubernetes-int-or-string": True}
    return result


def _plain(value: Any) -> Any:
    """Value without descriptions, which are most of a definition."""
    if isinstance(value, dict):
        return {
            k: ({n: _plain(s) for n, s in v.items()} if k == "properties" else _plain(v))
            for k, v in value.items()
            if k not in _DROPPED or not isinstance(v, str)
        }
    return [_plain(item) for item in value] if isinstance(value, list) else value
