"""Clusters, queues and priorities that the operator offers to jobs."""

from collections.abc import Sequence

from moe.spec import ResourcesSpec, spec_error
from service.kuberay_settings import KubeRaySettings

_OWN_ONLY = ("queue", "priority", "pod_template")
"""Fields of `resources` that a standing cluster has no use for."""


def check_shared(resources: ResourcesSpec) -> None:
    """Check the resources of a job on a standing Ray cluster. Raises SpecError."""
    if resources.cluster == "own":
        raise spec_error(
            "not_a_choice", "resources.cluster", "own", "is not offered by this service, which has one Ray cluster",
            "omit it",
        )  # fmt: skip
    for name in _OWN_ONLY:
        if getattr(resources, name) is not None:
            raise spec_error(
                "not_applicable", f"resources.{name}", None, "applies only to a cluster of the job's own (KubeRay)",
                "omit it",
            )  # fmt: skip


def check_own(resources: ResourcesSpec, settings: KubeRaySettings) -> None:
    """Check the resources of a job with a Ray cluster of its own. Raises SpecError."""
    if resources.cluster == "shared":
        raise spec_error(
            "not_a_choice", "resources.cluster", "shared",
            "is not offered by this service, where each job has a Ray cluster of its own", "omit it",
        )  # fmt: skip
    _check_name("queue", resources.queue, [settings.queue, *settings.queues])
    _check_name("priority", resources.priority, [settings.priority_class, *settings.priority_classes])
    if resources.priority is not None and not (resources.queue or settings.queue):
        raise spec_error(
            "requires", "resources.priority", resources.priority, "needs a queue, whose priority it is",
            "set resources.queue, or omit it",
        )  # fmt: skip


def _check_name(field: str, name: str | None, offered: Sequence[str]) -> None:
    if name is None or name in offered:
        return
    names = ", ".join(filter(None, dict.fromkeys(offered)))
    raise spec_error(
        "not_a_choice", f"resources.{field}", name, f"is not offered by this service (it has {names or 'none'})",
        f"use one of them, or omit it; its operator adds others to SHARDYARD_KUBERAY_{_SETTING_OF[field]}",
    )  # fmt: skip


_SETTING_OF = {"queue": "QUEUES", "priority": "PRIORITY_CLASSES"}
