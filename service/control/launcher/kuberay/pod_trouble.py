"""Troubles of an attempt's pods, with descriptions for users."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from service.control.launcher.kuberay.facts import Condition, ContainerFacts, EventFacts, PodFacts

MAX_WORDS = 400
_CANNOT_PULL = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
)
_CANNOT_CREATE = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PreCreateHookError"}
)
_PREEMPTIONS = {
    "PreemptionByScheduler": "preempted by a pod of higher priority",
    "EvictionByEvictionAPI": "evicted, because its node is being drained",
    "TerminationByKubelet": "ended by its node, which is short of resources or shutting down",
    "DeletionByTaintManager": "evicted, because its node has a taint that it does not tolerate",
}
"""Words by reason of a pod's condition DisruptionTarget."""
_LOST_REASONS = frozenset({"NodeLost", "NodeNotReady"})
_MOUNT_EVENTS = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
_ENDED_BY_NODE = frozenset({"Evicted", "Preempting", "Shutdown", "Terminated", "NodeShutdown", "NodeAffinity"})
"""Reasons of failed pods that their node ended."""
_SIGKILL = 137


class Severity(IntEnum):
    """Severity of a trouble: the most severe one is reported."""

    STARTING = 1
    UNSCHEDULED = 2
    BROKEN = 3
    """Does not start without a change."""
    CRASHED = 4
    OUT_OF_MEMORY = 5
    PREEMPTED = 6
    LOST = 7
    """Its node does not answer."""


@dataclass(frozen=True)
class PodTrouble:
    """Reason why a pod is not ready, or was restarted."""

    severity: Severity
    pod: PodFacts
    description: str


def one_line(text: str, limit: int = MAX_WORDS) -> str:
    """Text on one line, cut to a limit of characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 4]} ..."


def worst_trouble(
    pods: Sequence[PodFacts], events: Sequence[EventFacts], include_past: bool = False
) -> PodTrouble | None:
    """The gravest trouble of these pods, the head's first among equals; None if all are ready. `include_past`: also
    the ends of containers that have been restarted since."""
    troubles = [
        (trouble, pod.is_head) for pod in pods if (trouble := trouble_of(pod, events, include_past)) is not None
    ]
    if not troubles:
        return None
    worst, _ = max(troubles, key=lambda item: (item[0].severity, item[1], item[0].pod.name))
    num_others = sum(trouble.severity == worst.severity for trouble, _ in troubles) - 1
    if not num_others or worst.severity == Severity.STARTING:
        return worst
    others = f"; the same for {num_others} other pod{'s' if num_others > 1 else ''}"
    return PodTrouble(worst.severity, worst.pod, worst.description + others)


def trouble_of(pod: PodFacts, events: Sequence[EventFacts], include_past: bool = False) -> PodTrouble | None:
    """The gravest trouble of one pod."""
    if pod.is_ready and not include_past:
        containers = tuple(replace(container, termination=None) for container in pod.containers)
        pod = replace(pod, containers=containers)
    own_events = [event for event in events if event.kind == "Pod" and event.name == pod.name]
    for severity, find in _FINDERS:
        if description := find(pod, own_events):
            return PodTrouble(severity, pod, one_line(description))
    return None


def _node_loss(pod: PodFacts, events: Sequence[EventFacts]) -> str:
    node = f"node {pod.node}" if pod.node else "its node"
    ready = pod.conditions.get("Ready", Condition())
    is_silent = not ready.is_true and any(event.reason == "NodeNotReady" for event in events)
    if pod.reason in _LOST_REASONS or ready.reason in _LOST_REASONS or pod.phase == "Unknown" or is_silent:
        return f"{node} does not answer, with {_pod_name(pod)}"
    disruption = pod.conditions.get("DisruptionTarget", Condition())
    if disruption.is_true and disruption.reason == "DeletionByPodGC":
        return f"{node} is gone, with {_pod_name(pod)}"
    return ""


def _preemption(pod: PodFacts, _: Sequence[EventFacts]) -> str:
    node = f" (node {pod.node})" if pod.node else ""
    disruption = pod.conditions.get("DisruptionTarget", Condition())
    if disruption.is_true:
        cause = _PREEMPTIONS.get(disruption.reason, f"disrupted: {disruption.reason or 'no reason given'}")
        return f"{_pod_name(pod)} is {cause}{node}{_after_colon(disruption.message)}"
    if pod.phase == "Failed" and pod.reason in _ENDED_BY_NODE:
        return f"{_pod_name(pod)} was ended by its node{node}: {pod.reason}{_after_colon(pod.message)}"
    return ""


def _out_of_memory(pod: PodFacts, _: Sequence[EventFacts]) -> str:
    for container in pod.containers:
        if container.termination is not None and container.termination.reason == "OOMKilled":
            limit = (
                f"it used more than its limit of {container.memory_limit} of memory"
                if container.memory_limit
                else "its node ran out of memory"
            )
            return f"container {container.name} of {_pod_name(pod)} was OOM-killed: {limit}"
    return ""


def _crash(pod: PodFacts, _: Sequence[EventFacts]) -> str:
    for container in pod.containers:
        end = container.termination
        is_over = container.has_ended or container.waiting_reason == "CrashLoopBackOff"
        if end is None or not is_over or (end.exit_code == 0 and (container.is_init or container.has_ended)):
            continue
        kind = "init container" if container.is_init else "container"
        ending = "was killed (SIGKILL)" if end.exit_code == _SIGKILL else f"ended with exit code {end.exit_code}"
        times = f", {container.num_restarts} times" if container.num_restarts > 1 else ""
        cause = end.message or (end.reason if end.reason not in ("Error", "Completed") else "")
        return f"{kind} {container.name} of {_pod_name(pod)} {ending}{times}{_after_colon(cause)}"
    if pod.phase == "Failed":
        return f"{_pod_name(pod)} failed: {pod.reason or 'no reason given'}{_after_colon(pod.message)}"
    return ""


def _breakage(pod: PodFacts, events: Sequence[EventFacts]) -> str:
    for container in pod.containers:
        if container.waiting_reason in _CANNOT_PULL:
            return f"{_pod_name(pod)} cannot pull image {container.image}: " + (
                container.waiting_message or container.waiting_reason
            )
        if container.waiting_reason in _CANNOT_CREATE:
            return f"container {container.name} of {_pod_name(pod)} cannot start: " + (
                container.waiting_message or container.waiting_reason
            )
    mounts = [event for event in events if event.reason in _MOUNT_EVENTS]
    if mounts and not pod.is_ready and pod.phase in ("", "Pending"):
        newest = max(mounts, key=lambda event: event.last_s)
        return f"{_pod_name(pod)} cannot mount its volumes: {newest.message or newest.reason}"
    return ""


def _scheduling(pod: PodFacts, events: Sequence[EventFacts]) -> str:
    scheduled = pod.conditions.get("PodScheduled", Condition())
    if pod.node or scheduled.is_true or pod.is_ready:
        return ""
    failures = [event for event in events if event.reason == "FailedScheduling"]
    message = scheduled.message or (max(failures, key=lambda event: event.last_s).message if failures else "")
    if scheduled.reason == "SchedulingGated":
        return f"{_pod_name(pod)} waits for its scheduling gates{_after_colon(message)}"
    if "persistentvolumeclaim" in message.lower():
        return f"{_pod_name(pod)} waits for its volume claim: {message}"
    if scheduled.reason or message:
        return f"no node has room for {_pod_name(pod)}: {message or scheduled.reason}"
    return f"{_pod_name(pod)} waits to be scheduled"


def _start(pod: PodFacts, _: Sequence[EventFacts]) -> str:
    if pod.is_deleting:
        return f"{_pod_name(pod)} is being deleted" + (f" on node {pod.node}" if pod.node else "")
    if pod.is_ready or pod.phase == "Succeeded":
        return ""
    waiting = [container for container in pod.containers if not _is_up(container)]
    what = f": waiting for {_container_kind(waiting[0])} {waiting[0].name}" if waiting else ""
    return f"{_pod_name(pod)} is starting" + (f" on node {pod.node}" if pod.node else "") + what


def _is_up(container: ContainerFacts) -> bool:
    return container.is_ready or (container.is_init and container.has_ended)


def _container_kind(container: ContainerFacts) -> str:
    return "init container" if container.is_init else "container"


def _pod_name(pod: PodFacts) -> str:
    return f"{'head pod' if pod.is_head else 'pod'} {pod.name or 'without a name'}"


def _after_colon(message: str) -> str:
    return f": {message}" if message.strip() else ""


_Finder = Callable[[PodFacts, Sequence[EventFacts]], str]


_FINDERS: tuple[tuple[Severity, _Finder], ...] = (
    (Severity.LOST, _node_loss),
    (Severity.PREEMPTED, _preemption),
    (Severity.OUT_OF_MEMORY, _out_of_memory),
    (Severity.CRASHED, _crash),
    (Severity.BROKEN, _breakage),
    (Severity.UNSCHEDULED, _scheduling),
    (Severity.STARTING, _start),
)
"""Searches, the gravest first."""
