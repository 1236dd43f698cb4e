"""Pod templates drawn at random: those that break no rule, and anything else."""

import copy
import datetime
from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", "vector", "cache-2", "data"])
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
LABELS = st.dictionaries(st.sampled_from(["team", "example.org/tier", "x.y/z_1"]), st.sampled_from(["", "a", "B-1.c"]))

_fitting = {
    "env": st.lists(
        st.builds(lambda name, source: {"name": name, **source}, NAMES.map(str.upper), st.sampled_from([
            {"value": ""}, {"value": "1"}, {"valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
            {"valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}},
            {"valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
        ])),
        max_size=3, unique_by=lambda variable: variable["name"],
    ),
    "envFrom": st.sampled_from([[], [{"configMapRef": {"name": "c"}}], [{"secretRef": {"name": "s"}, "prefix": "P_"}]]),
    "securityContext": st.sampled_from([{}, {"runAsUser": 1000}, {"allowPrivilegeEscalation": False},
                                        {"capabilities": {"drop": ["ALL"]}}]),
    "imagePullPolicy": st.sampled_from(["Always", "IfNotPresent"]),
}  # fmt: skip
_volumes = st.lists(
    st.builds(lambda name, source: {"name": name, **source}, NAMES, st.sampled_from([
        {"configMap": {"name": "c"}}, {"secret": {"secretName": "s", "defaultMode": 288}}, {"emptyDir": {}},
        {"persistentVolumeClaim": {"claimName": "corpora", "readOnly": True}},
        {"projected": {"sources": [{"serviceAccountToken": {"audience": "sts", "path": "t"}}]}},
    ])),
    max_size=3, unique_by=lambda volume: volume["name"],
)  # fmt: skip


@st.composite
def _container(draw: st.DrawFn, name: str, volumes: list[str], is_ray: bool) -> dict[str, Any]:
    container = {"name": name, **draw(st.fixed_dictionaries({}, optional=_fitting))}
    if not is_ray:
        container["image"] = "sidecar:1"
        container |= draw(st.fixed_dictionaries({}, optional={
            "command": st.sampled_from([["sh"], ["cat", "/etc/x"]]),
            "resources": st.just({"requests": {"cpu": "100m"}, "limits": {"memory": "64Mi"}}),
            "readinessProbe": st.just({"httpGet": {"path": "/", "port": 80}}),
            "ports": st.just([{"containerPort": 9000, "name": "x"}]),
        }))  # fmt: skip
    if volumes:
        mounts = draw(st.lists(st.sampled_from(volumes), max_size=2, unique=True))
        container["volumeMounts"] = [{"name": mount, "mountPath": f"/mnt/{name}/{mount}"} for mount in mounts]
    return container


@st.composite
def templates(draw: st.DrawFn) -> dict[str, Any]:
    """Templates that break no rule of the operator's."""
    volumes = draw(_volumes)
    mounted = [volume["name"] for volume in volumes]
    sidecars = draw(st.lists(NAMES, max_size=2, unique=True))
    containers = [draw(_container(name, mounted, False)) for name in sidecars]
    if draw(st.booleans()):
        containers.insert(draw(st.integers(0, len(containers))), draw(_container("ray", mounted, True)))
    spec = draw(st.fixed_dictionaries({}, optional={
        "affinity": st.just({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"a": "b"}}}]}}),
        "imagePullSecrets": st.just([{"name": "registry"}]),
        "nodeSelector": st.sampled_from([{}, {"zone": "a"}]),
        "priorityClassName": st.just("training"),
        "runtimeClassName": st.just("nvidia"),
        "schedulerName": st.just("default-scheduler"),
        "securityContext": st.just({"supplementalGroups": [7]}),
        "tolerations": st.just([{"key": "spot", "operator": "Exists"}]),
    }))  # fmt: skip
    metadata = draw(st.fixed_dictionaries({}, optional={"labels": LABELS, "annotations": LABELS}))
    return {"metadata": metadata, "spec": {**spec, "containers": containers, "volumes": volumes}}


junk: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(2**70) | st.just(b"x")
    | st.just(datetime.date(2026, 12, 1)) | st.sampled_from(["\ud800", "\0", "/", "..", "ray", "/tmp/x"]),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(), parts, max_size=3)
    | st.fixed_dictionaries({"name": parts}),
    max_leaves=8,
)  # fmt: skip
"""Values of any type that a YAML file or a caller may bring."""


@st.composite
def damaged_templates(draw: st.DrawFn) -> Any:
    """A template with one value replaced or added."""
    template = copy.deepcopy(draw(templates()))
    place: Any = template
    while True:
        keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or draw(st.booleans()):
            break
        place = place[key]
    if isinstance(place, dict):
        known = ("hostPath", "hostNetwork", "image", "env", "spec", "containers", "value", "resources", "privileged")
        place[draw(st.sampled_from([*place, *known]))] = draw(junk)
    else:
        place.append(draw(junk))
    return template
