"""Pod templates: the operator's and a job's additions to the pods of a RayJob."""

import copy
from collections.abc import Mapping
from typing import Any

from moe.spec import SpecError
from service.control.launcher.kuberay.template_fields import RAY_CONTAINER
from service.control.launcher.kuberay.template_rules import TemplateRules, problems_of_template

Manifest = dict[str, Any]

_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "hostAliases": "ip",
    "ports": "containerPort",
    "topologySpreadConstraints": "topologyKey",
}
"""Key by which entries of a list are merged, as Kubernetes's strategic merge patch has them."""
_APPENDED = ("tolerations", "envFrom", "supplementalGroups")
"""Lists whose new entries are appended; any other list replaces the earlier one."""
_REPLACED = ("env", "volumes")
"""Lists whose entries have one source, and are replaced instead of merged."""
SIDECAR_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def check_template(template: Any, rules: TemplateRules) -> None:
    """Raise SpecError with every rule that the template breaks."""
    if problems := problems_of_template(template, rules):
        raise SpecError(problems)


def merge_template(pod: Manifest, template: Mapping[str, Any]) -> Manifest:
    """New pod with `metadata` and `spec` of a checked template merged into it.

    The template's container `ray` is merged into the pod's first one; other containers are sidecars, which get the
    security context that Pod Security `restricted` requires. Merging twice changes nothing.
    """
    ray_name = pod["spec"]["containers"][0]["name"]
    patch = _without_nulls(template)
    for key in ("containers", "initContainers"):
        for container in patch.get("spec", {}).get(key, ()):
            if container["name"] == RAY_CONTAINER:
                container["name"] = ray_name
            else:
                container["securityContext"] = _merge(SIDECAR_SECURITY, container.get("securityContext", {}))
    return _merge(pod, patch)


def _without_nulls(value: Any) -> Any:
    """Copy without null values, which stand for absent ones."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(item) for item in value if item is not None]
    return value


def _merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> Manifest:
    """Mapping with the patch's values over the base's."""
    merged = copy.deepcopy(dict(base))
    for key, value in patch.items():
        earlier = merged.get(key)
        if isinstance(value, Mapping) and isinstance(earlier, Mapping):
            merged[key] = _merge(earlier, value)
        elif isinstance(value, list) and isinstance(earlier, list):
            merged[key] = _merge_list(key, earlier, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def _merge_list(name: str, earlier: list[Any], entries: list[Any]) -> list[Any]:
    if name in _APPENDED:
        return earlier + [copy.deepcopy(entry) for entry in entries if entry not in earlier]
    merge_key = _MERGE_KEYS.get(name)
    if merge_key is None or not all(isinstance(entry, Mapping) for entry in (*earlier, *entries)):
        return copy.deepcopy(entries)
    merged = list(earlier)
    for entry in entries:
        index = next((i for i, other in enumerate(merged) if other.get(merge_key) == entry.get(merge_key)), None)
        if index is None:
            merged.append(copy.deepcopy(entry))
        else:
            merged[index] = copy.deepcopy(entry) if name in _REPLACED else _merge(merged[index], entry)
    return merged
