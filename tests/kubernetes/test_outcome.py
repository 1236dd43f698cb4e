"""Objects of an attempt on Kubernetes → its observation, in words."""

from typing import Any

import pytest

from service.control.launcher.kuberay.facts import AttemptFacts
from service.control.launcher.kuberay.outcome import observe
from service.wire.launch import FENCED_EXIT_CODE
from tests.kubernetes.resources import (
    CLUSTER,
    DENIAL,
    HEAD,
    IMAGE,
    JOB,
    NO_ROOM,
    QUOTA,
    READY,
    WORKER,
    condition,
    event,
    facts,
    pod,
    ray_cluster,
    ray_failure,
    ray_job,
    waiting,
    workload,
)

UP = ray_cluster("ready")
STARTING, RUNNING = ray_job("Initializing"), ray_job("Running", "RUNNING")
QUEUED = ray_job("Suspended", queue="gpus", suspend=True)
HEAD_UP = pod(HEAD, READY, node="n1")
PREEMPTED = condition("Evicted", "True", "Preempted", "Preempted to accommodate a workload (UID: 7)")


WAITING: dict[str, tuple[AttemptFacts, tuple[str, ...]]] = {
    "image pull back-off": (
        facts(STARTING, UP, (pod(HEAD, node="n1", container=waiting("ImagePullBackOff", "Back-off: not found")),)),
        (HEAD, IMAGE, "not found"),
    ),
    "missing secret": (
        facts(STARTING, UP, (pod(HEAD, container=waiting("CreateContainerConfigError", 'secret "s3" not found')),)),
        ("ray-head", HEAD, 'secret "s3" not found'),
    ),
    "unschedulable": (
        facts(STARTING, UP, (HEAD_UP, pod(WORKER, condition("PodScheduled", "False", "Unschedulable", NO_ROOM)))),
        (WORKER, NO_ROOM),
    ),
    "claim not bound": (
        facts(
            STARTING,
            UP,
            (
                pod(
                    HEAD,
                    condition(
                        "PodScheduled", "False", "Unschedulable", "pod has unbound immediate PersistentVolumeClaims"
                    ),
                ),
            ),
        ),
        (HEAD, "volume claim", "unbound"),
    ),
    "volume not mounted": (
        facts(
            STARTING,
            UP,
            (pod(HEAD, condition("PodScheduled"), node="n1"),),
            (event("Pod", HEAD, "FailedMount", "MountVolume.SetUp failed: connection timed out"),),
        ),
        (HEAD, "mount", "timed out"),
    ),
    "init container failing": (
        facts(
            STARTING,
            UP,
            (
                HEAD_UP,
                pod(
                    WORKER,
                    node="n2",
                    init={
                        "restartCount": 3,
                        **waiting("CrashLoopBackOff", "back-off"),
                        "lastState": {"terminated": {"exitCode": 1, "message": "GCS unreachable"}},
                    },
                ),
            ),
        ),
        ("init container wait-gcs-ready", WORKER, "exit code 1", "GCS unreachable"),
    ),
    "quota of the namespace": (
        facts(STARTING, ray_cluster("", condition("ReplicaFailure", "True", "FailedCreateWorkerPod", QUOTA))),
        ("quota", QUOTA),
    ),
    "quota, by an event": (
        facts(STARTING, ray_cluster(), (), (event("RayCluster", CLUSTER, "FailedToCreateWorkerPod", QUOTA),)),
        ("quota", QUOTA),
    ),
    "webhook denies pods": (
        facts(STARTING, ray_cluster("", condition("ReplicaFailure", "True", "FailedCreateHeadPod", DENIAL))),
        ("webhook", DENIAL),
    ),
    "in Kueue's queue": (
        facts(QUEUED, work=workload(condition("QuotaReserved", "False", "Pending", "insufficient unused quota"))),
        ("queue gpus", "insufficient unused quota"),
    ),
    "queue missing": (
        facts(
            QUEUED, work=workload(condition("QuotaReserved", "False", "Inadmissible", "LocalQueue gpus doesn't exist"))
        ),
        ("queue gpus", "LocalQueue gpus doesn't exist"),
    ),
    "admission check": (
        facts(
            QUEUED,
            work=workload(
                condition("QuotaReserved"),
                checks=[{"name": "capacity", "state": "Pending", "message": "nodes are being provisioned"}],
            ),
        ),
        ("capacity", "provisioned"),
    ),
    "no Kueue": (facts(QUEUED, after_s=60), ("gpus", "Kueue", "2026-12-01T12:00:00Z")),
    "deactivated by Kueue": (
        facts(
            QUEUED,
            work=workload(
                condition("Evicted", "True", "DeactivatedDueToRequeuingLimitExceeded", "exceeded"), active=False
            ),
        ),
        ("deactivated", "exceeded"),
    ),
    "pods not ready in time": (
        facts(
            QUEUED, work=workload(condition("Evicted", "True", "PodsReadyTimeout", "Exceeded the PodsReady timeout"))
        ),
        ("queue gpus", "PodsReady"),
    ),
    "no operator": (facts(ray_job(), after_s=45), ("operator", JOB, "2026-12-01T12:00:00Z")),
    "starting": (facts(STARTING, UP, (HEAD_UP, pod(WORKER, condition("PodScheduled"), node="n2"))), (WORKER, "1 of 2")),
}


@pytest.mark.parametrize("case", WAITING)
def test_waits(case: str) -> None:
    """A pending attempt says what it waits for, in one line."""
    attempt, words = WAITING[case]
    observation = observe(attempt)
    assert observation.status == "pending"
    assert not observation.has_ended
    for part in words:
        assert part in observation.waiting
    assert "\n" not in observation.waiting
    assert observation.queued == (case in ("in Kueue's queue", "pods not ready in time"))


OOM = {
    "ready": False,
    "restartCount": 1,
    "state": {"running": {}},
    "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
}
DRAINED = condition("DisruptionTarget", "True", "EvictionByEvictionAPI", "Eviction API: evicting")
PREEMPTED_POD = condition("DisruptionTarget", "True", "PreemptionByScheduler", "preempting to accommodate a pod")
TROUBLED: dict[str, tuple[AttemptFacts, tuple[str, ...]]] = {
    "worker out of memory": (
        facts(RUNNING, UP, (HEAD_UP, pod(WORKER, node="n2", container=OOM, phase="Running"))),
        ("ray-worker", WORKER, "OOM", "64Gi"),
    ),
    "node drained": (
        facts(RUNNING, UP, (HEAD_UP, pod(WORKER, READY, DRAINED, node="n2", is_deleting=True))),
        (WORKER, "n2", "drained"),
    ),
    "preempted by the scheduler": (
        facts(RUNNING, UP, (HEAD_UP, pod(WORKER, READY, PREEMPTED_POD, node="n2", is_deleting=True))),
        (WORKER, "n2", "higher priority"),
    ),
    "node lost": (
        facts(
            RUNNING,
            UP,
            (HEAD_UP, pod(WORKER, condition("Ready", "False"), node="n2", phase="Running")),
            (event("Pod", WORKER, "NodeNotReady", "Node is not ready"),),
        ),
        ("node n2", WORKER),
    ),
    "evicted by its node": (
        facts(
            RUNNING, UP, (HEAD_UP, pod(WORKER, node="n2", phase="Failed", reason="Evicted", message="low on memory"))
        ),
        ("n2", "Evicted", "low on memory"),
    ),
    "replaced": (
        facts(RUNNING, UP, (HEAD_UP, pod(WORKER, condition("PodScheduled", "False", "Unschedulable", NO_ROOM)))),
        (WORKER, NO_ROOM),
    ),
    "Kueue evicts": (
        facts(ray_job("Running", "RUNNING", queue="gpus"), UP, (HEAD_UP,), work=workload(PREEMPTED)),
        ("Kueue", "Preempted to accommodate"),
    ),
}


@pytest.mark.parametrize("case", TROUBLED)
def test_runs_in_trouble(case: str) -> None:
    """The driver handles lost workers; the words name the pod, its node and the cause."""
    attempt, words = TROUBLED[case]
    observation = observe(attempt)
    assert observation.status == "running"
    for part in words:
        assert part in observation.waiting


def test_runs_well() -> None:
    earlier_kill = {"state": {"running": {}}, "lastState": OOM["lastState"]}
    attempt = facts(RUNNING, UP, (HEAD_UP, pod(WORKER, READY, node="n2", container=earlier_kill)))
    assert observe(attempt).model_dump(exclude_defaults=True) == {"status": "running"}


ENDED: dict[str, tuple[AttemptFacts, dict[str, Any], tuple[str, ...]]] = {
    "succeeded": (facts(ray_job("Complete", "SUCCEEDED")), {"status": "succeeded"}, ()),
    "driver failed": (
        facts(
            ray_job("Failed", "FAILED", reason="AppFailed", message=ray_failure(1, "Traceback\nValueError: bad data"))
        ),
        {"status": "failed", "output": "Traceback\nValueError: bad data"},
        ("exit code 1", "ValueError: bad data"),
    ),
    "driver failed on a lost node's neighbour": (
        facts(
            ray_job("Failed", "FAILED", reason="AppFailed", message=ray_failure(1, "lost")),
            UP,
            (HEAD_UP, pod(WORKER, node="n2", phase="Failed", reason="Evicted", message="low on memory")),
        ),
        {"status": "failed", "output": "lost"},
        ("exit code 1", "n2", "low on memory"),
    ),
    "head out of memory": (
        facts(
            ray_job("Failed", "FAILED", message="the driver died"), UP, (pod(HEAD, READY, node="n1", container=OOM),)
        ),
        {"status": "failed"},
        ("OOM", "64Gi", HEAD),
    ),
    "second driver": (
        facts(ray_job("Failed", "FAILED", message=ray_failure(FENCED_EXIT_CODE, "fenced")), UP, (HEAD_UP,)),
        {"status": "failed", "lost": True},
        ("second time",),
    ),
    "second driver after an eviction": (
        facts(
            ray_job("Failed", "FAILED", queue="gpus", message=ray_failure(FENCED_EXIT_CODE, "fenced")),
            work=workload(condition("Evicted", "False", "QuotaReserved", "Previously: Preempted")),
        ),
        {"status": "failed", "lost": True, "preempted": True},
        ("Kueue",),
    ),
    "head pod deleted": (
        facts(ray_job("Failed", reason="AppFailed", message="Ray head pod not found.")),
        {"status": "failed", "lost": True},
        ("head pod not found",),
    ),
    "head's node drained": (
        facts(
            ray_job("Failed", "FAILED", message="The driver's process was lost"), UP, (pod(HEAD, DRAINED, node="n1"),)
        ),
        {"status": "failed", "preempted": True},
        ("n1", "drained"),
    ),
    "not submitted": (
        facts(ray_job("Failed", reason="SubmissionFailed", message="connection refused")),
        {"status": "failed"},
        ("submitted", "connection refused"),
    ),
    "refused by KubeRay": (
        facts(ray_job("ValidationFailed", reason="ValidationFailed", message="name is too long")),
        {"status": "failed", "refused": True},
        (JOB, "name is too long"),
    ),
    "stopped": (facts(ray_job("Complete", "STOPPED")), {"status": "stopped"}, ("stopped",)),
    "suspended by force": (
        facts(ray_job("Suspended", suspend=True)),
        {"status": "stopped", "lost": True},
        (JOB, "suspended"),
    ),
    "being suspended": (
        facts(ray_job("Suspending", suspend=True), UP, (HEAD_UP,)),
        {"status": "stopped", "lost": True, "released": False},
        (JOB,),
    ),
    "preempted by Kueue": (
        facts(QUEUED, work=workload(PREEMPTED)),
        {"status": "stopped", "preempted": True},
        ("Kueue", "Preempted to accommodate a workload"),
    ),
    "being preempted by Kueue": (
        facts(ray_job("Suspending", queue="gpus", suspend=True), UP, (HEAD_UP,), work=workload(PREEMPTED)),
        {"status": "stopped", "preempted": True, "released": False},
        ("Kueue",),
    ),
    "being deleted by hand": (
        facts(ray_job("Running", "RUNNING", is_deleting=True), UP, (HEAD_UP,)),
        {"status": "stopped", "lost": True, "released": False},
        (JOB, "deleted"),
    ),
    "deleted by hand": (facts(was_seen=True), {"status": "unknown", "forgotten": True}, ("deleted",)),
    "deleted by hand, with pods": (facts(pods=(HEAD_UP,), was_seen=True), {"status": "unknown"}, ("n1",)),
    "never there": (facts(), {"status": "unknown"}, ("no RayJob",)),
}


@pytest.mark.parametrize("case", ENDED)
def test_ends(case: str) -> None:
    attempt, fields, words = ENDED[case]
    observation = observe(attempt)
    observed = observation.model_dump(exclude_defaults=True, exclude={"message", "waiting"})
    assert observed == fields
    for part in words:
        assert part in observation.message
    assert bool(observation.waiting) == (not observation.released)
