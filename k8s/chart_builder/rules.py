"""Fields that values of the chart set: everything else is as the kustomize base and components have it.

A path is the object's kind and name and the keys to the field, with items of lists by name, joined by `/`, which is
`~1` within a key. `*` stands for any part of one key, `**` for any number of keys.
"""

import re
from dataclasses import dataclass, field
from functools import cache


@dataclass(frozen=True)
class Replacement:
    """A field whose value is always a template expression's."""

    path: str
    expression: str


@dataclass(frozen=True)
class Override:
    """A field that one of the chart's values replaces where it is set."""

    path: str
    value: str
    """Go template expression of the value, empty where it is not set."""


@dataclass(frozen=True)
class Addition:
    """Template lines after the keys of a mapping or the items of a list."""

    path: str
    lines: str
    """`INDENT` stands for the lines' own indentation."""


@dataclass(frozen=True)
class Condition:
    """A field that is left out unless a condition on the chart's values holds."""

    path: str
    expression: str
    """Go template expression, in which `{key}` is the field's own key."""


Rule = Replacement | Override | Addition | Condition

_CONTROL_PLANE = "Deployment/control-plane/spec/template/spec"
_CONTAINER = f"{_CONTROL_PLANE}/containers/control-plane"
_HEAD = "RayCluster/ray/spec/headGroupSpec/template/spec"
_GROUP = "RayCluster/ray/spec/workerGroupSpecs/*"
_WORKER = f"{_GROUP}/template/spec"

RULES: tuple[Rule, ...] = (
    Replacement("*/*/metadata/namespace", "{{ .Release.Namespace }}"),
    Replacement("RoleBinding/*/subjects/*/namespace", "{{ .Release.Namespace }}"),
    Replacement(
        "ClusterQueue/*/spec/namespaceSelector/matchLabels/kubernetes.io~1metadata.name", "{{ .Release.Namespace }}"
    ),
    Addition("*/*/metadata/labels", '{{- include "shardyard.labels" . | nindent INDENT }}'),
    Addition(
        "ServiceAccount/*",
        "{{- with .Values.image.pullSecrets }}\nimagePullSecrets: {{- toYaml . | nindent INDENT }}\n{{- end }}",
    ),
    Replacement("**/containers/*/image", '{{ include "shardyard.image" . }}'),
    Replacement("**/initContainers/*/image", '{{ include "shardyard.image" . }}'),
    Addition("**/containers/*", "{{- with .Values.image.pullPolicy }}\nimagePullPolicy: {{ . }}\n{{- end }}"),
    Replacement(f"{_CONTAINER}/env/SHARDYARD_KUBERAY_IMAGE/value", '{{ include "shardyard.image" . }}'),
    Replacement(f"{_CONTAINER}/env/SHARDYARD_KUBERAY_WARM_NODES/value", "{{ .Values.ownClusters.warmNodes | squote }}"),
    Replacement(f"{_CONTAINER}/env/SHARDYARD_KUBERAY_SHARED_TOKEN_SECRET/value", "{{ .Values.secrets.ray }}"),
    Replacement(f"{_CONTAINER}/env/SHARDYARD_ALLOWED_HOSTS/value", '{{ include "shardyard.hosts" . | squote }}'),
    Addition(
        f"{_CONTAINER}/env",
        """{{- if .Values.ownClusters.enabled }}
- name: SHARDYARD_KUBERAY_POOLS
  value: {{ .Values.ownClusters.pools | toJson | squote }}
{{- with .Values.ownClusters.podTemplate }}
- name: SHARDYARD_KUBERAY_POD_TEMPLATE
  value: {{ toJson . | squote }}
{{- end }}
{{- end }}
{{- range $name, $value := .Values.controlPlane.settings }}
- name: {{ $name }}
  value: {{ $value | toString | squote }}
{{- end }}""",
    ),
    Condition(f"{_CONTAINER}/env/SHARDYARD_*", 'not (hasKey .Values.controlPlane.settings "{key}")'),
    Override("Deployment/control-plane/spec/replicas", ".Values.controlPlane.replicas"),
    Override(f"{_CONTAINER}/resources", ".Values.controlPlane.resources"),
    Override(f"{_HEAD}/containers/ray-head/resources", ".Values.standingCluster.head.resources"),
    Override(f"{_GROUP}/replicas", ".Values.standingCluster.workers.replicas"),
    Override(f"{_GROUP}/maxReplicas", ".Values.standingCluster.workers.maxReplicas"),
    Override(f"{_WORKER}/containers/ray-worker/resources", ".Values.standingCluster.workers.resources"),
    Addition(
        _WORKER,
        "{{- with .Values.standingCluster.workers.nodeSelector }}\n"
        "nodeSelector: {{- toYaml . | indent 2 | nindent INDENT }}\n{{- end }}",
    ),
    Replacement("RayCluster/ray/spec/authOptions/secretName", "{{ .Values.secrets.ray }}"),
    Replacement(f"{_CONTROL_PLANE}/volumes/ray-token/secret/secretName", "{{ .Values.secrets.ray }}"),
    Replacement("**/env/SHARDYARD_TOKEN/valueFrom/secretKeyRef/name", "{{ .Values.secrets.token }}"),
    Replacement("**/env/SHARDYARD_DATABASE_URL/valueFrom/secretKeyRef/name", "{{ .Values.postgres.secret }}"),
    Replacement(
        "**/envFrom/{'secretRef': {'name': 'object-store'}}/secretRef/name", "{{ .Values.objectStore.secret }}"
    ),
    Replacement(f"{_CONTAINER}/env/SHARDYARD_KUBERAY_STORAGE_SECRET/value", "{{ .Values.objectStore.secret }}"),
    Replacement(
        f"{_CONTAINER}/env/SHARDYARD_STORAGE_ROOTS/value", "{{ list .Values.objectStore.url | toJson | squote }}"
    ),
    Replacement("**/volumes/storage/persistentVolumeClaim/claimName", "{{ .Values.storage.claim }}"),
    Replacement("**/volumes/state/persistentVolumeClaim/claimName", "{{ .Values.state.claim }}"),
    Replacement(
        f"{_CONTAINER}/env/SHARDYARD_KUBERAY_STORAGE_CLAIM/value",
        '{{ ternary "" .Values.storage.claim .Values.objectStore.enabled | squote }}',
    ),
    Replacement("PersistentVolumeClaim/storage/metadata/name", "{{ .Values.storage.claim }}"),
    Replacement("PersistentVolumeClaim/state/metadata/name", "{{ .Values.state.claim }}"),
    Override("PersistentVolumeClaim/storage/spec/accessModes", ".Values.storage.accessModes"),
    Override("PersistentVolumeClaim/storage/spec/resources/requests/storage", ".Values.storage.size"),
    Override("PersistentVolumeClaim/state/spec/resources/requests/storage", ".Values.state.size"),
    Addition(
        "PersistentVolumeClaim/storage/spec",
        "{{- with .Values.storage.className }}\nstorageClassName: {{ . }}\n{{- end }}",
    ),
    Addition(
        "PersistentVolumeClaim/state/spec", "{{- with .Values.state.className }}\nstorageClassName: {{ . }}\n{{- end }}"
    ),
    *(
        Addition(
            f"ConfigMap/{name}/data",
            "{{- range $name, $value := .Values.collectives }}\n"
            "{{ $name }}: {{ $value | toString | squote }}\n{{- end }}",
        )
        for name in ("nccl", "rccl")
    ),
    Replacement(
        "ServiceAccount/*/metadata/annotations", "{{- toYaml .Values.objectStore.workloadIdentity | nindent 4 }}"
    ),
    Replacement("Ingress/api/spec/rules/*/host", "{{ .Values.ingress.host }}"),
    Replacement("Ingress/api/spec/tls/*/hosts", "[{{ .Values.ingress.host }}]"),
    Override("Ingress/api/spec/ingressClassName", ".Values.ingress.className"),
    Override("Ingress/api/metadata/annotations", ".Values.ingress.annotations"),
    Replacement("Gateway/api/spec/listeners/https/hostname", "{{ .Values.gateway.host }}"),
    Replacement("HTTPRoute/api/spec/hostnames", "[{{ .Values.gateway.host }}]"),
    Override("Gateway/api/spec/gatewayClassName", ".Values.gateway.className"),
    Override("Gateway/api/metadata/annotations", ".Values.gateway.annotations"),
    Replacement(f"{_CONTAINER}/env/SHARDYARD_KUBERAY_QUEUE/value", "{{ .Values.kueue.localQueue }}"),
    Replacement("LocalQueue/training/metadata/name", "{{ .Values.kueue.localQueue }}"),
    *(
        Addition(
            f"{kind}/*/metadata/labels", "{{- with .Values.monitoring.labels }}{{ toYaml . | nindent INDENT }}{{ end }}"
        )
        for kind in ("ServiceMonitor", "PodMonitor", "PrometheusRule")
    ),
    Replacement(
        "ServiceMonitor/control-plane/spec/endpoints/**/authorization/credentials/name", "{{ .Values.secrets.token }}"
    ),
    Replacement("Role/control-plane/rules/**/resourceNames", "[{{ .Values.storage.claim }}]"),
    Replacement("Role/control-plane-queues/rules/**/resourceNames", "[{{ .Values.kueue.localQueue }}]"),
    Replacement("CronJob/backup/spec/schedule", "{{ .Values.backup.schedule | squote }}"),
    Replacement(
        "CronJob/backup/**/command",
        "[tini, --, shardyard, backup, {{ .Values.backup.place | squote }}, --keep, "
        "{{ .Values.backup.keep | toString | squote }}]",
    ),
    Replacement("CronJob/restore/**/command", "[tini, --, shardyard, restore, {{ .Values.backup.place | squote }}]"),
    Override("ClusterQueue/shardyard/spec/resourceGroups", ".Values.kueue.resourceGroups"),
)


@dataclass
class Rules:
    """The rules, with those that have been applied."""

    rules: tuple[Rule, ...] = RULES
    _used: set[str] = field(default_factory=set)

    def of(self, path: str) -> list[Rule]:
        """Rules of a field, in order."""
        matching = [rule for rule in self.rules if _pattern(rule.path).fullmatch(path)]
        self._used |= {rule.path for rule in matching}
        return matching

    def unused(self) -> list[str]:
        """Paths of rules whose field is in no object: the manifests have changed."""
        return sorted({rule.path for rule in self.rules} - self._used)


@cache
def _pattern(path: str) -> re.Pattern[str]:
    """Regular expression of a rule's path."""
    parts = (".+" if part == "**" else re.escape(part).replace(r"\*", "[^/]*") for part in path.split("/"))
    return re.compile("/".join(parts))
