"""Any mixture of objects and conditions gives one observation, in words."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from service.control.launcher.kuberay.outcome import observe
from service.wire.launch import FENCED_EXIT_CODE
from tests.kubernetes.resources import (
    CLUSTER,
    DENIAL,
    HEAD,
    NO_ROOM,
    QUOTA,
    READY,
    WORKER,
    condition,
    ended,
    event,
    facts,
    pod,
    ray_cluster,
    ray_failure,
    ray_job,
    waiting,
    workload,
)

STATUSES = st.sampled_from(
    [
        "",
        "Initializing",
        "Running",
        "Complete",
        "Failed",
        "ValidationFailed",
        "Suspending",
        "Suspended",
        "Retrying",
        "Waiting",
        "OfALaterRelease",
    ]
)
JOBS = st.none() | st.builds(
    ray_job,
    STATUSES,
    st.sampled_from(["", "PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"]),
    queue=st.sampled_from(["", "gpus"]),
    suspend=st.booleans(),
    is_deleting=st.booleans(),
    message=st.sampled_from(
        ["", "Ray head pod not found.", ray_failure(1), ray_failure(FENCED_EXIT_CODE), "lost\nhere"]
    ),
)
CONDITIONS = st.builds(
    condition,
    st.sampled_from(
        [
            "Ready",
            "PodScheduled",
            "DisruptionTarget",
            "QuotaReserved",
            "Evicted",
            "Admitted",
            "Preempted",
            "ReplicaFailure",
        ]
    ),
    st.sampled_from(["True", "False", "Unknown", ""]),
    st.sampled_from(["", "Unschedulable", "Preempted", "PodsReadyTimeout", "DeletionByTaintManager", "NodeLost"]),
    st.sampled_from(["", QUOTA, DENIAL, NO_ROOM]),
)
STATES = st.one_of(
    st.just({}),
    st.builds(waiting, st.sampled_from(["", "ImagePullBackOff", "CrashLoopBackOff"])),
    st.builds(ended, st.integers(0, 255), st.sampled_from(["OOMKilled", "Error", "Completed"])),
)
PODS = st.builds(
    lambda name, conditions, **fields: pod(name, *conditions, **fields),
    st.sampled_from([HEAD, WORKER]),
    st.lists(CONDITIONS | st.just(READY), max_size=3),
    node=st.sampled_from(["", "n1"]),
    container=STATES,
    init=st.none() | STATES,
    is_deleting=st.booleans(),
)
EVENTS = st.builds(
    event,
    st.sampled_from(["Pod", "RayCluster"]),
    st.sampled_from([HEAD, WORKER, CLUSTER]),
    st.sampled_from(["FailedMount", "NodeNotReady", "FailedToCreateHeadPod"]),
    st.sampled_from(["", QUOTA]),
)


@given(
    job=JOBS,
    cluster=st.none() | st.builds(lambda items: ray_cluster("", *items), st.lists(CONDITIONS, max_size=2)),
    pods=st.lists(PODS, max_size=3),
    events=st.lists(EVENTS, max_size=3),
    work=st.none()
    | st.builds(lambda items, active: workload(*items, active=active), st.lists(CONDITIONS), st.booleans()),
    after_s=st.sampled_from([0.0, 3600.0]),
    was_seen=st.booleans(),
)
def test_any_facts_are_told_in_words(
    job: Any, cluster: Any, pods: Any, events: Any, work: Any, after_s: float, was_seen: bool
) -> None:
    observation = observe(facts(job, cluster, tuple(pods), tuple(events), work, after_s, was_seen))
    words = observation.waiting if observation.status in ("pending", "running") else observation.message
    assert words or observation.status == "running"
    assert observation.released or (observation.has_ended and observation.waiting)
    for line in (observation.message, observation.waiting):
        assert "\n" not in line
        assert len(line) <= 2000
    if observation.preempted or observation.lost or observation.refused:
        assert observation.has_ended


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda values: (
            st.lists(values, max_size=2)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "status",
                        "metadata",
                        "spec",
                        "conditions",
                        "containers",
                        "name",
                        "containerStatuses",
                        "state",
                        "type",
                    ]
                ),
                values,
            )
        ),
        max_leaves=20,
    )
)
def test_malformed_objects_are_read(value: Any) -> None:
    """Objects of other releases, or with fields of other types, are no error."""
    resource = value if isinstance(value, dict) else {"status": value, "spec": value, "metadata": value}
    assert observe(facts(resource, resource, (resource,), (resource,), resource)).status == "pending"
