"""Pods of a Ray cluster: the head's and the workers' templates, as Pod Security `restricted` admits them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from moe.spec import spec_error
from service.control.launcher.kuberay.names import SUBMISSION_ANNOTATION
from service.control.launcher.kuberay.pod_template import check_template, merge_template
from service.control.launcher.kuberay.pools import WorkerPods
from service.control.launcher.kuberay.template_fields import FREE_POD_FIELDS, RAY_CONTAINER
from service.control.launcher.kuberay.template_rules import TemplateRules
from service.kuberay_settings import KubeRaySettings
from service.node_pool import NodePool
from service.quantities import format_bytes, format_cores

USER_ID = 1000
"""User of the image, and of the control plane, whose files for its drivers nobody else may read."""
COMPONENT_LABEL = "app.kubernetes.io/component"
HEAD_COMPONENT, WORKER_COMPONENT = "ray-head", "ray-worker"
"""Values of `COMPONENT_LABEL`, by which network policies select pods; also the containers' names."""
OPERATOR_TEMPLATE, JOB_TEMPLATE = "kuberay.pod_template", "resources.pod_template"
"""Paths of pod templates in messages."""
HEALTH_CHECKS = {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "5000"}
"""The head's checks of nodes: a node is lost after five failed ones. A node whose pod is gone is lost after 5 s instead
of 15 s, one that does not answer after 30 s instead of 65 s (docs/design/launch.md#lost-nodes)."""
TMP, SHARED_MEMORY = "/tmp", "/dev/shm"
_VOLUMES_OF_ONE_POD = frozenset({"emptyDir", "ephemeral", "configMap", "secret", "downwardAPI", "projected"})
"""Sources of volumes that no other pod writes to."""

Manifest = dict[str, Any]


class PodMaker:
    """Makes the pod templates of one cluster, with the operator's and the job's templates merged into them."""

    def __init__(
        self,
        settings: KubeRaySettings,
        *,
        labels: Mapping[str, str],
        submission_id: str,
        cache: str,
        job_template: Mapping[str, Any] | None = None,
        topology: bool = False,
    ) -> None:
        """`cache`: folder for prepared corpora, if any. `topology`: whether Kueue places the pods. Raises SpecError for
        a template that breaks a rule."""
        self._settings, self._labels, self._submission_id = settings, dict(labels), submission_id
        self._cache, self._topology = cache, topology
        self._templates = [settings.pod_template] if settings.pod_template else []
        check_operators_template(settings, cache)
        check_jobs_template(job_template, settings, cache)
        if job_template:
            self._templates.append(dict(job_template))

    def make_head(self) -> Manifest:
        """Make the template of the head's pod, in which drivers run."""
        settings = self._settings
        amounts = {"cpu": format_cores(settings.head_cpus), "memory": format_bytes(settings.head_memory)}
        pod = self._pod(HEAD_COMPONENT, amounts, settings.head_memory // 4)
        pod["spec"]["containers"][0]["env"] += [{"name": name, "value": value} for name, value in HEALTH_CHECKS.items()]
        pod["spec"]["containers"][0]["ports"] = [
            {"name": "gcs-server", "containerPort": 6379},
            {"name": "dashboard", "containerPort": 8265},
            *pod["spec"]["containers"][0]["ports"],
        ]
        if settings.head_node_selector:
            pod["spec"]["nodeSelector"] = dict(settings.head_node_selector)
        return self._merged(pod)

    def make_worker(self, pods: WorkerPods) -> Manifest:
        """Make the template of the workers' pods."""
        pool = pods.pool
        amounts = {"cpu": format_cores(pods.cpus), "memory": format_bytes(pods.memory_bytes), **pool.resources}
        if pods.gpus:
            amounts[pool.gpu_resource] = str(pods.gpus)
        pod = self._pod(WORKER_COMPONENT, amounts, pods.shared_memory_bytes)
        self._place(pod, pool)
        return self._merged(pod)

    def _place(self, pod: Manifest, pool: NodePool) -> None:
        """Add the pool's nodes and network."""
        pod["metadata"]["annotations"].update(pool.annotations)
        if pool.topology and self._topology:
            pod["metadata"]["annotations"][f"kueue.x-k8s.io/podset-{pool.topology_mode}-topology"] = pool.topology
        spec = pod["spec"]
        container = spec["containers"][0]
        if pool.node_selector:
            spec["nodeSelector"] = dict(pool.node_selector)
        if pool.tolerations:
            spec["tolerations"] = [toleration.to_manifest() for toleration in pool.tolerations]
        if pool.runtime_class:
            spec["runtimeClassName"] = pool.runtime_class
        if pool.host_network:
            # Names of Services are still resolved by the cluster's DNS.
            spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
        if pool.lock_memory:
            container["securityContext"]["capabilities"]["add"] = ["IPC_LOCK"]
        if pool.config_map:
            container.setdefault("envFrom", []).append({"configMapRef": {"name": pool.config_map, "optional": True}})

    def _pod(self, component: str, amounts: dict[str, str], shared_memory_bytes: int) -> Manifest:
        settings = self._settings
        mounts, volumes = _storage(settings, self._cache)
        mounts += [{"name": "tmp", "mountPath": TMP}, {"name": "shared-memory", "mountPath": SHARED_MEMORY}]
        volumes += [
            # Ray's session and logs, and records until they are sealed on the storage.
            {"name": "tmp", "emptyDir": {}},
            # For NCCL and Ray's object store; KubeRay would give it all of the container's memory.
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": format_bytes(shared_memory_bytes)}},
        ]
        container: Manifest = {
            "name": component,
            "image": settings.image,
            "env": [{"name": "HOME", "value": TMP}],
            "ports": [{"name": "metrics", "containerPort": 8080}],
            "resources": {"requests": dict(amounts), "limits": dict(amounts)},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": mounts,
            # An evicted pod waits until training has committed a checkpoint, at most its grace period.
            "lifecycle": {"preStop": {"exec": {"command": [settings.python, "-m", "service.run.await_training_end"]}}},
        }
        if settings.storage_secret:
            container["envFrom"] = [{"secretRef": {"name": settings.storage_secret}}]
        spec: Manifest = {
            "serviceAccountName": settings.service_account,
            "automountServiceAccountToken": False,
            # A Service named shardyard would set SHARDYARD_PORT.
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": settings.termination_grace_s,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER_ID,
                "runAsGroup": USER_ID,
                "fsGroup": USER_ID,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": volumes,
        }
        if settings.image_pull_secrets:
            spec["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
        labels = {**self._labels, COMPONENT_LABEL: component}
        annotations = {SUBMISSION_ANNOTATION: self._submission_id} if self._submission_id else {}
        return {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}

    def _merged(self, pod: Manifest) -> Manifest:
        for template in self._templates:
            pod = merge_template(pod, template)
        return pod


def check_operators_template(settings: KubeRaySettings, cache: str) -> None:
    """Check the pod template of the settings. Raises SpecError."""
    if settings.pod_template:
        check_template(settings.pod_template, rules_for_operator(settings, cache))


def check_jobs_template(template: Mapping[str, Any] | None, settings: KubeRaySettings, cache: str) -> None:
    """Check a job's pod template. Raises SpecError."""
    if template is None:
        return
    if not settings.allow_pod_templates:
        raise spec_error("not_allowed", JOB_TEMPLATE, None, "is refused by this service",
                         "omit it; its operator allows it with SHARDYARD_KUBERAY_ALLOW_POD_TEMPLATES")  # fmt: skip
    check_template(template, rules_for_job(settings, cache))


def _storage(settings: KubeRaySettings, cache: str) -> tuple[list[Manifest], list[Manifest]]:
    """(mounts, volumes) of the jobs' claim, and of a cache that is not on it: each pod then has its own."""
    mounts: list[Manifest] = []
    volumes: list[Manifest] = []
    if settings.storage_claim:
        mounts.append({"name": "storage", "mountPath": settings.storage_path})
        volumes.append({"name": "storage", "persistentVolumeClaim": {"claimName": settings.storage_claim}})
    if cache and not any(
        PurePosixPath(cache).is_relative_to(path) for path in (TMP, *(mount["mountPath"] for mount in mounts))
    ):
        mounts.append({"name": "cache", "mountPath": cache})
        volumes.append({"name": "cache", "emptyDir": {}})
    return mounts, volumes


def pod_mounts(settings: KubeRaySettings) -> tuple[str, ...]:
    """Folders that every pod of a cluster mounts from volumes of the operator: the jobs' claim, and those of the
    operator's pod template that outlive a pod."""
    spec = settings.pod_template.get("spec") or {}
    volumes = {volume["name"] for volume in spec.get("volumes") or () if not volume.keys() & _VOLUMES_OF_ONE_POD}
    rays = [container for container in spec.get("containers") or () if container["name"] == RAY_CONTAINER]
    mounts = [mount for ray in rays for mount in ray.get("volumeMounts") or ()]
    claims = [settings.storage_path] if settings.storage_claim else []
    return (*claims, *(mount["mountPath"].rstrip("/") for mount in mounts if mount["name"] in volumes))


def rules_for_operator(settings: KubeRaySettings, cache: str) -> TemplateRules:
    """Rules for the operator's template."""
    mounts, volumes = _storage(settings, cache)
    return TemplateRules(
        path=OPERATOR_TEMPLATE,
        user_id=USER_ID,
        mount_paths=(TMP, SHARED_MEMORY, *(mount["mountPath"] for mount in mounts)),
        volumes=frozenset({"tmp", "shared-memory", "shared-mem", *(volume["name"] for volume in volumes)}),
        node_labels=frozenset(label for pool in settings.pools for label in pool.node_selector)
        | frozenset(settings.head_node_selector),
        gpu_resources=frozenset(pool.gpu_resource for pool in settings.pools),
        host_network=bool(settings.pools) and all(pool.host_network for pool in settings.pools),
    )


def rules_for_job(settings: KubeRaySettings, cache: str) -> TemplateRules:
    """Rules for a job's template, which is merged after the operator's."""
    rules = rules_for_operator(settings, cache)
    spec = settings.pod_template.get("spec") or {}
    sidecars = [
        c for key in ("containers", "initContainers") for c in spec.get(key) or () if c["name"] != RAY_CONTAINER
    ]
    rays = [container for container in spec.get("containers") or () if container["name"] == RAY_CONTAINER]
    mount_paths = [mount["mountPath"] for ray in rays for mount in ray.get("volumeMounts") or ()]
    fixed_fields = {key for key in spec if key in FREE_POD_FIELDS and not isinstance(spec[key], list)}
    if any(pool.runtime_class for pool in settings.pools):
        fixed_fields.add("runtimeClassName")
    return replace(
        rules,
        path=JOB_TEMPLATE,
        private_volumes=frozenset(volume["name"] for volume in spec.get("volumes") or ()),
        fixed_fields=frozenset(fixed_fields),
        node_labels=rules.node_labels | frozenset(spec.get("nodeSelector") or {}),
        keys=settings.template_keys,
        mount_paths=(*rules.mount_paths, *mount_paths),
        volumes=rules.volumes | {volume["name"] for volume in spec.get("volumes") or ()},
        containers=frozenset(container["name"] for container in sidecars),
        secrets=frozenset(settings.template_secrets),
        claims=frozenset(settings.template_claims),
    )
