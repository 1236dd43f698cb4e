"""Rules for pod templates: fields that a template may set, and values that are this service's."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from moe.spec import Problem, ProblemCode
from moe.spec.plain_values import first_problem
from service.control.launcher.kuberay.template_fields import (
    APPARMOR,
    CONTAINER_SECURITY_FIELDS,
    FREE_CONTAINER_FIELDS,
    FREE_POD_FIELDS,
    MAX_ANNOTATION_BYTES,
    OUR_KEYS,
    OUR_VARIABLES,
    POD_SECURITY_FIELDS,
    PROBES,
    PROJECTED_SOURCES,
    RAY_CONTAINER,
    RAY_FIELDS,
    REMEDIES,
    RESERVED_CONTAINERS,
    VARIABLE_SOURCES,
    VOLUME_SOURCES,
)

_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_.-][A-Za-z0-9_.-]*")
_API_AUDIENCE = re.compile(r"(https://)?kubernetes(\.default(\.svc(\.[a-z0-9.-]+)?)?)?/?|api")
"""Usual audiences of API servers."""
_TYPES: dict[type, str] = {dict: "a mapping", list: "a list", str: "text"}


@dataclass(frozen=True)
class TemplateRules:
    """Names and paths in a pod that a template must leave alone, and what it may use."""

    path: str
    """Place of the template: a setting, or a key of a spec."""
    user_id: int
    mount_paths: tuple[str, ...]
    volumes: frozenset[str]
    containers: frozenset[str] = frozenset()
    """Containers of the operator's template, which a job's may not change."""
    private_volumes: frozenset[str] = frozenset()
    """Volumes of the operator's template, which a job's may not mount."""
    fixed_fields: frozenset[str] = frozenset()
    """Fields of a pod that the pools or the operator's template set, and a job's template may not."""
    node_labels: frozenset[str] = frozenset()
    """Labels in the node selectors of pools, and of the operator's template."""
    gpu_resources: frozenset[str] = frozenset()
    host_network: bool = False
    secrets: frozenset[str] | None = None
    """Secrets that it may use; None for any."""
    claims: frozenset[str] | None = None
    """Claims that it may mount; None for any."""
    keys: tuple[str, ...] | None = None
    """Labels and annotations that it may set, by name, or by prefix with a final '/'; None for any."""


def problems_of_template(template: Any, rules: TemplateRules) -> list[Problem]:
    """Every rule that the template breaks; of a template that JSON cannot express, the first of those."""
    if (problem := first_problem(template, rules.path)) is not None:
        return [problem]
    checker = _TemplateChecker(rules)
    if template is None:
        checker.is_a(template, rules.path, dict)
    entries = template if isinstance(template, dict) else {}
    for key in (key for key, value in entries.items() if value is None and key not in ("metadata", "spec")):
        checker.report("unknown_key", f"{rules.path}.{key}", None, "is not a key of a pod template",
                       "use metadata and spec")  # fmt: skip
    for key, value in checker.items(template, rules.path):
        path = f"{rules.path}.{key}"
        if key == "metadata":
            checker.check_metadata(value, path)
        elif key == "spec":
            checker.check_pod(value, path)
        else:
            checker.report("unknown_key", path, None, "is not a key of a pod template", "use metadata and spec")
    return checker.problems


@dataclass
class _TemplateChecker:
    """Collects the problems of one template."""

    rules: TemplateRules
    problems: list[Problem] = field(default_factory=list)

    def report(self, code: ProblemCode, path: str, value: Any, rule: str, remedy: str) -> None:
        """Note a problem; of the value, only a scalar is shown."""
        plain = value if isinstance(value, str | int | float) else None
        self.problems.append(Problem(code, path, plain, rule, remedy))

    def is_a(self, value: Any, path: str, kind: type) -> bool:
        """Whether the value is of a type; reports it if not."""
        if isinstance(value, kind):
            return True
        self.report("wrong_type", path, value, f"must be {_TYPES[kind]}", f"write it as {_TYPES[kind]}")
        return False

    def items(self, value: Any, path: str) -> list[tuple[str, Any]]:
        """Entries of a mapping that are not null."""
        if value is None or not self.is_a(value, path, dict):
            return []
        return [(key, item) for key, item in value.items() if item is not None]

    def entries(self, value: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """(path, entry) of a list of mappings."""
        if value is not None and self.is_a(value, path, list):
            for index, entry in enumerate(value):
                if self.is_a(entry, f"{path}[{index}]", dict):
                    yield f"{path}[{index}]", entry

    def named_entries(
        self, value: Any, path: str, pattern: re.Pattern[str] = _NAME
    ) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(path, name, entry) of a list of mappings with unique names."""
        names: set[str] = set()
        for place, entry in self.entries(value, path):
            name = entry.get("name")
            if not isinstance(name, str) or not pattern.fullmatch(name):
                self.report("invalid_value", f"{place}.name", name, "must be a name", "name it")
            elif name in names:
                self.report("duplicate", f"{place}.name", name, "is used twice", "rename one")
            else:
                names.add(name)
                yield place, name, entry

    def check_metadata(self, value: Any, path: str) -> None:
        for key, item in self.items(value, path):
            if key not in ("labels", "annotations"):
                self.refuse_field(key, item, path)
                continue
            num_bytes = sum(len(f"{name}{text}".encode()) for name, text in self.items(item, f"{path}.{key}"))
            if num_bytes > MAX_ANNOTATION_BYTES:
                self.report("too_large", f"{path}.{key}", None, f"has {num_bytes:,} bytes, and Kubernetes keeps "
                            f"{MAX_ANNOTATION_BYTES:,}", "use a ConfigMap")  # fmt: skip
            for name, text in self.items(item, f"{path}.{key}"):
                place = f"{path}.{key}.{name}"
                if name.startswith((*OUR_KEYS, APPARMOR)):
                    self.report("not_allowed", place, text, "is not a template's to set",
                                "omit it: pods are known and confined by it")  # fmt: skip
                elif not _LABEL_KEY.fullmatch(name):
                    self.report("invalid_value", f"{path}.{key}", name, "has a key that names no label",
                                "write it as example.org/team")  # fmt: skip
                elif self.rules.keys is not None and not self.is_listed(name):
                    # Network policies, network attachments, injected sidecars and cloud identities go by them.
                    self.report("not_allowed", place, text, "is not a label or annotation that jobs may set",
                                "ask the operator to list it in SHARDYARD_KUBERAY_TEMPLATE_KEYS")  # fmt: skip
                elif self.is_a(text, place, str) and key == "labels" and not _LABEL_VALUE.fullmatch(text):
                    self.report("invalid_value", place, text, "must be the value of a label",
                                "use at most 63 letters, digits, '-', '_' and '.'")  # fmt: skip

    def is_listed(self, name: str) -> bool:
        """Whether a job's template may set a label or annotation of this name."""
        return any(name.startswith(key) if key.endswith("/") else name == key for key in self.rules.keys or ())

    def refuse_field(self, key: str, value: Any, path: str) -> None:
        self.report("not_allowed", f"{path}.{key}", value, "is not a template's to set", REMEDIES.get(key, "omit it"))

    def check_pod(self, value: Any, path: str) -> None:
        pod = dict(self.items(value, path))
        volumes = {
            name for _, name, _ in _TemplateChecker(self.rules).named_entries(pod.get("volumes"), "")
        } | self.rules.volumes
        container_names: set[str] = set()
        for key, item in pod.items():
            place = f"{path}.{key}"
            match key:
                case "containers" | "initContainers":
                    for entry_place, name, entry in self.named_entries(item, place):
                        if name in container_names:
                            self.report("duplicate", f"{entry_place}.name", name, "is used twice", "rename one")
                        container_names.add(name)
                        self.check_container(name, entry, entry_place, volumes, is_init=key == "initContainers")
                case "volumes":
                    for entry_place, name, entry in self.named_entries(item, place):
                        self.check_volume(name, entry, entry_place)
                case "imagePullSecrets":
                    for entry_place, name, _ in self.named_entries(item, place):
                        self.check_secret(name, f"{entry_place}.name")
                case "nodeSelector":
                    self.check_node_selector(item, place)
                case "securityContext":
                    self.check_security(item, place, POD_SECURITY_FIELDS, is_ray=True)
                case "hostNetwork":
                    if item is not False and not (item is True and self.rules.host_network):
                        self.report("not_allowed", place, item, "is refused unless every node pool has host_network",
                                    "omit it, or set host_network in SHARDYARD_KUBERAY_POOLS")  # fmt: skip
                case _ if key in self.rules.fixed_fields:
                    self.report("not_allowed", place, item, "is set by the operator", "omit it")
                case _ if key in FREE_POD_FIELDS:
                    if self.is_a(item, place, FREE_POD_FIELDS[key]) and isinstance(item, list):
                        list(self.entries(item, place))
                    if key == "priorityClassName" and str(item).startswith("system-"):
                        self.report("not_allowed", place, item, "is a class of the cluster's own pods", "use another")
                case _:
                    self.refuse_field(key, item, path)

    def check_node_selector(self, value: Any, path: str) -> None:
        for name, text in self.items(value, path):
            if name in self.rules.node_labels:
                self.report("not_allowed", f"{path}.{name}", text, "is in a node selector of the operator", "omit it")
            elif self.is_a(text, f"{path}.{name}", str) and not (
                _LABEL_KEY.fullmatch(name) and _LABEL_VALUE.fullmatch(text)
            ):
                self.report("invalid_value", f"{path}.{name}", text, "must be the value of a label", "correct it")

    def check_container(self, name: str, entry: dict[str, Any], path: str, volumes: set[str], is_init: bool) -> None:
        is_ray = name == RAY_CONTAINER and not is_init
        if name in RESERVED_CONTAINERS or name in self.rules.containers or (is_init and name == RAY_CONTAINER):
            self.report("not_allowed", f"{path}.name", name, "is the name of another container",
                        f"rename it; Ray's container is named {RAY_CONTAINER}")  # fmt: skip
            return
        if not is_ray and not entry.get("image"):
            self.report("missing", f"{path}.image", None, "is required", "add it")
        for key, item in self.items(entry, path):
            place = f"{path}.{key}"
            if is_ray and key not in RAY_FIELDS:
                self.refuse_field(key, item, path)
            elif key == "env":
                self.check_variables(item, place)
            elif key == "envFrom":
                for entry_place, source in self.entries(item, place):
                    self.check_secret_reference(source.get("secretRef"), f"{entry_place}.secretRef")
            elif key == "volumeMounts":
                self.check_mounts(item, place, volumes)
            elif key == "securityContext":
                self.check_security(item, place, CONTAINER_SECURITY_FIELDS, is_ray)
            elif key == "resources":
                self.check_amounts(item, place)
            elif key == "ports":
                for entry_place, port in self.entries(item, place):
                    if port.get("hostPort"):
                        self.refuse_field("hostPort", port["hostPort"], entry_place)
            elif key in FREE_CONTAINER_FIELDS:
                if self.is_a(item, place, FREE_CONTAINER_FIELDS[key]) and key in PROBES:
                    self.check_probe(item, place)
            elif key != "name":
                self.refuse_field(key, item, path)

    def check_probe(self, value: dict[str, Any], path: str) -> None:
        """Refuse a request to another host, which the kubelet would make."""
        for key, item in self.items(value, path):
            if key in ("httpGet", "tcpSocket"):
                for name, target in self.items(item, f"{path}.{key}"):
                    if name == "host" and target != "":
                        self.refuse_field(name, target, f"{path}.{key}")
            elif key in ("postStart", "preStop") and self.is_a(item, f"{path}.{key}", dict):
                self.check_probe(item, f"{path}.{key}")

    def check_variables(self, value: Any, path: str) -> None:
        for place, name, entry in self.named_entries(value, path, _VARIABLE):
            if name in OUR_VARIABLES or name.startswith("SHARDYARD_"):
                self.report("not_allowed", f"{place}.name", name, "is a variable of Shardyard or KubeRay", "omit it")
            if entry.get("value") is not None:
                self.is_a(entry["value"], f"{place}.value", str)
            for key, item in self.items(entry.get("valueFrom"), f"{place}.valueFrom"):
                if key not in VARIABLE_SOURCES:
                    self.report("not_allowed", f"{place}.valueFrom.{key}", None, "is not a source of variables that a "
                                "template may use", f"use one of {', '.join(VARIABLE_SOURCES)}")  # fmt: skip
                elif key == "secretKeyRef":
                    self.check_secret_reference(item, f"{place}.valueFrom.secretKeyRef")

    def check_mounts(self, value: Any, path: str, volumes: set[str]) -> None:
        paths: set[PurePosixPath] = set()
        for place, entry in self.entries(value, path):
            volume, mount_path = entry.get("name"), entry.get("mountPath")
            if volume not in volumes:
                self.report("not_found", f"{place}.name", volume, "is not a volume of the pod", "add it to volumes")
            elif volume in self.rules.private_volumes:
                self.report("not_allowed", f"{place}.name", volume, "is a volume of the operator's pod template",
                            "mount a volume of your own")  # fmt: skip
            for name in ("subPath", "subPathExpr"):
                sub_path = entry.get(name)
                if sub_path is None or not self.is_a(sub_path, f"{place}.{name}", str):
                    continue
                if sub_path.startswith("/") or ".." in sub_path.split("/"):
                    self.report("invalid_value", f"{place}.{name}", sub_path, "must be a path in the volume",
                                "write it without a first '/' and without '..'")  # fmt: skip
            if not isinstance(mount_path, str) or not mount_path.startswith("/") or ".." in mount_path.split("/"):
                self.report("invalid_value", f"{place}.mountPath", mount_path, "must be an absolute path", "correct it")
                continue
            folder = PurePosixPath("/" + mount_path.lstrip("/"))
            if folder in paths:
                self.report("duplicate", f"{place}.mountPath", mount_path, "is used twice", "mount one elsewhere")
            paths.add(folder)
            ours = next((ours for ours in self.rules.mount_paths if _overlap(PurePosixPath(ours), folder)), None)
            if ours is not None:
                self.report("not_allowed", f"{place}.mountPath", mount_path, f"overlaps {ours}", "mount it elsewhere")

    def check_volume(self, name: str, entry: dict[str, Any], path: str) -> None:
        if name in self.rules.volumes:
            self.report("not_allowed", f"{path}.name", name, "is a volume of every pod", "rename it")
        sources = [(key, item) for key, item in self.items(entry, path) if key != "name"]
        if len(sources) != 1:
            self.report("invalid_value", path, None, "must have one source", f"use one of {', '.join(VOLUME_SOURCES)}")
        for key, item in sources:
            place = f"{path}.{key}"
            if key not in VOLUME_SOURCES or (key in ("csi", "ephemeral") and self.rules.secrets is not None):
                self.report("not_allowed", place, None, "is not a source of volumes that a template may use",
                            f"use one of {', '.join(VOLUME_SOURCES)}")  # fmt: skip
            elif self.is_a(item, place, dict):
                self.check_source(key, item, place)

    def check_source(self, kind: str, source: dict[str, Any], path: str) -> None:
        if kind == "secret":
            self.check_secret(source.get("secretName"), f"{path}.secretName")
        elif kind == "persistentVolumeClaim":
            claim = source.get("claimName")
            if self.rules.claims is not None and claim not in self.rules.claims:
                self.report("not_allowed", f"{path}.claimName", claim, "is not a claim that jobs may mount",
                            "ask the operator to list it in SHARDYARD_KUBERAY_TEMPLATE_CLAIMS")  # fmt: skip
        elif kind == "projected":
            for place, entry in self.entries(source.get("sources"), f"{path}.sources"):
                for key, item in self.items(entry, place):
                    self.check_projection(key, item, f"{place}.{key}")

    def check_projection(self, kind: str, source: Any, path: str) -> None:
        """Check one source of a projected volume."""
        if kind == "secret":
            self.check_secret_reference(source, path)
        elif kind not in PROJECTED_SOURCES:
            self.report("not_allowed", path, None, "is not a source of volumes that a template may use",
                        f"use one of {', '.join(PROJECTED_SOURCES)}")  # fmt: skip
        elif kind == "serviceAccountToken" and self.is_a(source, path, dict):
            audience = source.get("audience")
            if self.rules.secrets is not None:
                self.report("not_allowed", path, None, "speaks for the pods' service account",
                            "omit it: the operator's pod template can have it")  # fmt: skip
            elif not isinstance(audience, str) or not audience or _API_AUDIENCE.fullmatch(audience):
                self.report("not_allowed", path, audience, "is a token of the API server", "name another audience")

    def check_secret_reference(self, reference: Any, path: str) -> None:
        if reference is not None and self.is_a(reference, path, dict):
            self.check_secret(reference.get("name"), f"{path}.name")

    def check_secret(self, name: Any, path: str) -> None:
        if self.rules.secrets is not None and name not in self.rules.secrets:
            self.report("not_allowed", path, name, "is not a Secret that jobs may use",
                        "ask the operator to list it in SHARDYARD_KUBERAY_TEMPLATE_SECRETS")  # fmt: skip

    def check_amounts(self, value: Any, path: str) -> None:
        for key, amounts in self.items(value, path):
            for name, amount in self.items(amounts, f"{path}.{key}") if key in ("limits", "requests") else ():
                if name in self.rules.gpu_resources:
                    self.report("not_allowed", f"{path}.{key}.{name}", amount, "is for Ray's container", "omit it")

    def check_groups(self, value: Any, path: str) -> None:
        if self.rules.secrets is not None:
            self.report("not_allowed", path, None, "opens files of other groups",
                        "omit it: the operator's pod template can have it")  # fmt: skip
        elif self.is_a(value, path, list):
            for index, group in enumerate(value):
                if type(group) is not int or group < 1:
                    self.report("not_allowed", f"{path}[{index}]", group, "must be the number of a group that is not "
                                "root's", "omit it")  # fmt: skip

    def check_security(self, value: Any, path: str, fields: tuple[str, ...], is_ray: bool) -> None:
        """Refuse what Pod Security `restricted` refuses, and another user."""
        user = self.rules.user_id
        values: dict[str, tuple[bool | int, ...]] = {
            "allowPrivilegeEscalation": (False,),
            "privileged": (False,),
            "readOnlyRootFilesystem": (True,) if is_ray else (True, False),
            "runAsNonRoot": (True,),
            "runAsUser": (user,),
            "runAsGroup": (user,),
            "fsGroup": (user,),
        }
        for key, item in self.items(value, path):
            place = f"{path}.{key}"
            if key not in fields:
                self.refuse_field(key, item, path)
            elif key == "capabilities":
                for name, capabilities in self.items(item, place):
                    if (name, capabilities) != ("drop", ["ALL"]):
                        self.refuse_field(name, capabilities, place)
            elif key == "supplementalGroups":
                self.check_groups(item, place)
            elif key in values and not any(type(item) is type(choice) and item == choice for choice in values[key]):
                words = " or ".join(str(choice).lower() for choice in values[key])
                self.report("not_allowed", place, item, f"must be {words}", "omit it")


def _overlap(one: PurePosixPath, other: PurePosixPath) -> bool:
    return one.is_relative_to(other) or other.is_relative_to(one)
