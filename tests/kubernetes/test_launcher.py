"""RayJobs against an API server: submitted once, observed, stopped, deleted, whatever the server does meanwhile."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe.spec import SpecError
from service.control.kubernetes import EVENTS, LOCAL_QUEUES, PODS, RAY_JOBS
from service.control.launcher.kuberay.launcher import POSTPONED_S, STALE_S, KubeRayLauncher
from service.control.launcher.kuberay.names import SUBMISSION_ANNOTATION
from service.control.launcher.kuberay.preflight import check_cluster
from service.control.launcher.launcher import LauncherUnavailable, LaunchPostponed, LaunchRefusal
from tests.kubernetes.api_server import ROOT, ApiServer
from tests.kubernetes.apiserver.faults import Denial
from tests.kubernetes.launching import Clock, await_observation, kuberay_settings, launcher_on, name_of, new_launch
from tests.kubernetes.objects import event, ray_job
from tests.kubernetes.operator import Operator
from tests.processes import await_that


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def launcher(shared_server: ApiServer, clock: Clock) -> Iterator[KubeRayLauncher]:
    launcher = launcher_on(shared_server, clock)
    yield launcher
    launcher.close()
    shared_server.heal()
    shared_server.deny()


@pytest.fixture
def operator(shared_server: ApiServer) -> Operator:
    return Operator(shared_server)


def test_an_attempt_from_its_submission_to_its_end(
    launcher: KubeRayLauncher, operator: Operator, shared_server: ApiServer, tmp_path: Path
) -> None:
    launch = new_launch(tmp_path)
    name = name_of(launch)
    assert launcher.observe(launch.submission_id).status == "unknown"
    launcher.submit(launch)
    assert launcher.observe(launch.submission_id).status == "pending", "known at once, before any watch tells"
    assert launcher.dashboard_url(launch.submission_id) is None
    await_observation(launcher, launch, status="pending", waiting="operator")
    operator.start_cluster(name)
    await_observation(launcher, launch, waiting=f"{name}-head-0")
    worker = operator.pods()[f"{name}-worker-0"]
    about = {**worker, "kind": "Pod"}
    shared_server.admin(
        "POST", EVENTS, body=event(f"{name}-event", about, "FailedScheduling", "0/3 nodes are available")
    )
    head_ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    shared_server.set_status(PODS, f"{name}-head-0", head_ready)
    await_observation(launcher, launch, waiting="0/3 nodes are available")
    operator.run(name)
    await_observation(launcher, launch, status="running", waiting="")
    url = launcher.dashboard_url(launch.submission_id)
    assert url == f"http://{name}-head-svc.shardyard.svc.cluster.local:8265/#/jobs/{launch.submission_id}"
    output = "Traceback\nValueError: bad data"
    message = (
        f"Job entrypoint command failed with exit code 1, last available logs (truncated to 20,000 chars):\n{output}"
    )
    operator.end(name, "FAILED", message, "AppFailed")
    observation = await_observation(launcher, launch, status="failed", message="ValueError: bad data")
    assert (observation.output, observation.released) == (output, True)


def test_submitting_again_changes_nothing(
    shared_server: ApiServer, launcher: KubeRayLauncher, operator: Operator, tmp_path: Path
) -> None:
    """Not by this control plane, not by the next, and not where Kueue has started the RayJob meanwhile."""
    launch = new_launch(tmp_path, queue="gpus")
    launcher.submit(launch)
    operator.queue(name_of(launch), "insufficient quota")
    operator.admit(name_of(launch))
    before = operator.ray_jobs()[name_of(launch)]
    assert before["spec"]["suspend"] is False
    launcher.submit(launch)
    second = launcher_on(shared_server, queues=("gpus",))
    try:
        second.submit(launch.model_copy(update={"max_failures": 0}))
        await_observation(second, launch, status="pending", waiting="admitted")
    finally:
        second.close()
    assert operator.ray_jobs()[name_of(launch)] == before


@pytest.mark.parametrize("fault", ["drop", "drop_response", "status"])
def test_a_submission_whose_answer_is_lost_is_made_once(
    shared_server: ApiServer, launcher: KubeRayLauncher, operator: Operator, tmp_path: Path, fault: str
) -> None:
    launch = new_launch(tmp_path)
    shared_server.fault(fault, verb="create", resource="rayjobs", count=2, code=429, retry_after_s=0)
    launcher.submit(launch)
    uid = operator.ray_jobs()[name_of(launch)]["metadata"]["uid"]
    shared_server.fault("drop_response", verb="create", resource="rayjobs", count=50)
    launcher.submit(launch)
    assert operator.ray_jobs()[name_of(launch)]["metadata"]["uid"] == uid


def test_two_control_planes_that_submit_at_once_make_one(
    shared_server: ApiServer, launcher: KubeRayLauncher, operator: Operator, tmp_path: Path
) -> None:
    """The old leader's request arrives while the new one's is on its way."""
    launch = new_launch(tmp_path)
    other = launcher_on(shared_server)
    shared_server.fault("delay", verb="create", resource="rayjobs", seconds=0.3)
    try:
        launcher.submit(launch)
        before = operator.ray_jobs()[name_of(launch)]
        other.submit(launch)
    finally:
        other.close()
    assert operator.ray_jobs()[name_of(launch)] == before


def test_a_refused_launch_says_who_refuses_it(
    shared_server: ApiServer, launcher: KubeRayLauncher, operator: Operator, tmp_path: Path
) -> None:
    launch = new_launch(tmp_path)
    shared_server.deny(Denial("rayjobs", "images must come from registry.example", "policy.example"))
    with pytest.raises(LaunchRefusal, match=r"webhook.*policy\.example.*registry\.example"):
        launcher.submit(launch)
    shared_server.deny()
    assert name_of(launch) not in operator.ray_jobs()


@pytest.mark.parametrize("annotation", ["", "job-of-another-a7", "own"])
def test_a_ray_job_of_the_same_name_that_is_not_ours_is_never_adopted(
    shared_server: ApiServer, launcher: KubeRayLauncher, operator: Operator, tmp_path: Path, annotation: str
) -> None:
    launch = new_launch(tmp_path)
    body = ray_job(name_of(launch))
    if annotation == "own":
        annotation = launch.submission_id
        del body["metadata"]["labels"]  # made by hand
    body["metadata"]["annotations"] = {SUBMISSION_ANNOTATION: annotation}
    shared_server.admin("POST", RAY_JOBS, body=body)
    before = operator.ray_jobs()[name_of(launch)]
    for _ in range(2):
        with pytest.raises(LaunchRefusal, match=name_of(launch)):
            launcher.submit(launch)
        launcher.stop(launch.submission_id)
    assert operator.ray_jobs()[name_of(launch)] == before


def test_a_quota_postpones_a_launch(
    shared_server: ApiServer, launcher: KubeRayLauncher, operator: Operator, clock: Clock, tmp_path: Path
) -> None:
    launch = new_launch(tmp_path)
    shared_server.deny(Denial("rayjobs", "exceeded quota: jobs, requested: 1, used: 9, limited: 9"))
    with pytest.raises(LaunchPostponed, match="used: 9"):
        launcher.submit(launch)
    shared_server.deny()
    shared_server.forget_requests()
    with pytest.raises(LaunchPostponed, match="used: 9"):
        launcher.submit(launch)
    assert [entry for entry in shared_server.requests() if entry["verb"] == "create"] == [], "asked again only later"
    clock.offset_s += POSTPONED_S
    launcher.submit(launch)
    assert name_of(launch) in operator.ray_jobs()


def test_a_stop_suspends_and_a_second_one_deletes(
    launcher: KubeRayLauncher, operator: Operator, tmp_path: Path
) -> None:
    launch = new_launch(tmp_path)
    name = name_of(launch)
    launcher.submit(launch)
    operator.start_cluster(name)
    operator.run(name)
    await_observation(launcher, launch, status="running")
    launcher.stop(launch.submission_id)
    assert operator.ray_jobs()[name]["spec"]["suspend"] is True
    operator.set_job(name, "Suspending")
    await_observation(launcher, launch, status="stopped", released=False, waiting=name)
    operator.finish_suspension(name)
    await_observation(launcher, launch, status="stopped", released=True, message="suspended")
    launcher.stop(launch.submission_id)
    await_that(lambda: name not in operator.ray_jobs())
    await_observation(launcher, launch, status="unknown")
    launcher.stop(launch.submission_id)


def test_a_stop_deletes_what_kueue_would_start_again(
    shared_server: ApiServer, operator: Operator, tmp_path: Path
) -> None:
    launch = new_launch(tmp_path)
    name = name_of(launch)
    launcher = launcher_on(shared_server, queue="gpus")
    try:
        launcher.submit(launch)
        operator.queue(name, "insufficient unused quota for nvidia.com/gpu")
        await_observation(launcher, launch, status="pending", waiting="insufficient unused quota for nvidia.com/gpu")
        operator.admit(name)
        operator.start_cluster(name)
        operator.run(name)
        await_observation(launcher, launch, status="running")
        operator.evict(name, "Preempted", "preempted by another workload")
        await_observation(launcher, launch, status="stopped", preempted=True, released=False)
        operator.finish_suspension(name)
        await_observation(launcher, launch, preempted=True, released=True, message="preempted by another workload")
        launcher.stop(launch.submission_id)
        await_that(lambda: name not in operator.ray_jobs())
    finally:
        launcher.close()


def test_a_deleted_job_leaves_nothing(launcher: KubeRayLauncher, operator: Operator, tmp_path: Path) -> None:
    first, other = new_launch(tmp_path), new_launch(tmp_path / "other")
    attempts = [first, first.model_copy(update={"attempt": 2})]
    for launch in (*attempts, other):
        launcher.submit(launch)
        operator.start_cluster(name_of(launch))
        operator.run(name_of(launch))
        await_observation(launcher, launch, status="running")
    launcher.forget_job(first.job_id)
    launcher.forget_job(first.job_id)
    names = [name_of(launch) for launch in attempts]
    await_that(lambda: not any(name.startswith(tuple(names)) for name in (*operator.ray_jobs(), *operator.pods())))
    assert name_of(other) in operator.ray_jobs()
    assert f"{name_of(other)}-head-0" in operator.pods()


def test_a_rayjob_deleted_by_hand_is_lost_and_not_made_again(
    launcher: KubeRayLauncher, operator: Operator, shared_server: ApiServer, tmp_path: Path
) -> None:
    launch = new_launch(tmp_path)
    launcher.submit(launch)
    operator.start_cluster(name_of(launch))
    operator.run(name_of(launch))
    await_observation(launcher, launch, status="running")
    shared_server.admin("DELETE", RAY_JOBS, name_of(launch))
    observation = await_observation(launcher, launch, status="unknown", forgotten=True)
    assert "deleted" in observation.message


def test_a_server_that_is_killed_and_started_again(api_server: ApiServer, tmp_path: Path) -> None:
    """Short absences are no news; then nothing is said of jobs; then all is known again, also unwatched changes."""
    clock, operator, launch = Clock(), Operator(api_server), new_launch(tmp_path)
    launcher = launcher_on(api_server, clock)
    try:
        launcher.submit(launch)
        operator.start_cluster(name_of(launch))
        operator.run(name_of(launch))
        await_observation(launcher, launch, status="running")
        api_server.kill()
        assert launcher.observe(launch.submission_id).status == "running"
        await_that(lambda: launcher._mirror.out_of_sync_since is not None)
        clock.offset_s += STALE_S
        with pytest.raises(LauncherUnavailable, match="cannot watch Kubernetes"):
            launcher.observe(launch.submission_id)
        api_server.start()
        operator.end(name_of(launch))
        api_server.compact()
        await_that(lambda: _status(launcher, launch.submission_id) == "succeeded")
    finally:
        launcher.close()


def _status(launcher: KubeRayLauncher, submission_id: str) -> str:
    try:
        return launcher.observe(submission_id).status
    except LauncherUnavailable:
        return ""


def test_a_launcher_adopts_what_another_submitted(
    shared_server: ApiServer, launcher: KubeRayLauncher, operator: Operator, tmp_path: Path
) -> None:
    launch = new_launch(tmp_path)
    launcher.submit(launch)
    operator.start_cluster(name_of(launch))
    operator.run(name_of(launch))
    second = launcher_on(shared_server)
    try:
        assert second.observe(launch.submission_id).status == "running"
    finally:
        second.close()


def test_what_is_not_offered_is_refused(launcher: KubeRayLauncher, shared_server: ApiServer, tmp_path: Path) -> None:
    for resources, path in (
        ({"cluster": "shared"}, "resources.cluster"), ({"queue": "gpus"}, "resources.queue"),
        ({"priority": "high"}, "resources.priority"), ({"pod_template": {}}, "resources.pod_template"),
    ):  # fmt: skip
        with pytest.raises(SpecError) as refusal:
            launcher.check(new_launch(tmp_path, **resources).spec.resources)
        assert refusal.value.problems[0].path == path


def role_rules() -> list[dict[str, list[str]]]:
    """Rules of the control plane's Roles."""
    files = [ROOT / "k8s/components" / name / "role.yaml" for name in ("own-clusters", "kueue")]
    manifests = [manifest for path in files for manifest in yaml.safe_load_all(path.read_text())]
    return [rule for manifest in manifests if manifest["kind"] == "Role" for rule in manifest["rules"]]


def test_it_uses_the_verbs_of_its_role_and_no_others(tmp_path: Path) -> None:
    rules = role_rules()
    with ApiServer(tmp_path, rules=rules) as server:
        operator, launch = Operator(server), new_launch(tmp_path / "job", queue="training")
        other = new_launch(tmp_path / "other")
        settings: dict[str, Any] = {"queues": ("training",)}
        api = server.api()
        queue = {"apiVersion": LOCAL_QUEUES.api_version, "kind": "LocalQueue", "metadata": {"name": "training"}}
        server.admin("POST", LOCAL_QUEUES, body=queue)
        check_cluster(api, kuberay_settings(**settings), cache="")
        api.close()
        launcher = launcher_on(server, **settings)
        server.fault("drop_response", verb="create", resource="rayjobs", count=1)  # a lost answer is looked up
        try:
            for attempt in (launch, other):
                launcher.submit(attempt)
                operator.start_cluster(name_of(attempt))
                operator.run(name_of(attempt))
                await_observation(launcher, attempt, status="running")
                launcher.stop(attempt.submission_id)
                launcher.forget_job(attempt.job_id)
        finally:
            launcher.close()
        used = {(entry["group"], entry["resource"], entry["verb"]) for entry in server.requests()}
        used -= {("authorization.k8s.io", "selfsubjectaccessreviews", "create")}  # any account may ask about itself
        assert {entry["code"] for entry in server.requests()} & {401, 403} == set()
    granted = {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert used == granted
