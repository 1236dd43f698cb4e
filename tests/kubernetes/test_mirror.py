"""The mirror against a server that is written to, compacted, broken and killed."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from service.control.kubernetes import (
    EVENTS,
    PODS,
    RAY_JOBS,
    WATCHED,
    WORKLOADS,
    Forbidden,
    KubernetesApi,
    Mirror,
    NotFound,
    Resource,
)
from service.control.kubernetes.prune import prune
from service.control.kubernetes.retry import Backoff, RetryPolicy
from service.control.kubernetes.watched import WATCHED_KUEUE, WatchedResource
from tests.kubernetes.api_server import CONTROLLER, ApiServer
from tests.kubernetes.conftest import require_definitions
from tests.kubernetes.objects import Object, event, pod, ray_job, reference
from tests.processes import await_that

FAST = Backoff(first_s=0.01, longest_s=0.05)
FIELDS = {entry.resource: entry for entry in (*WATCHED, WATCHED_KUEUE)}
RESOURCES = {entry.resource.name: entry.resource for entry in WATCHED}


def expected_objects(server: ApiServer, entry: WatchedResource) -> dict[str, Object]:
    """Objects of a resource as the server has them, pruned: the obvious reference."""
    query = {"labelSelector": entry.label_selector, "fieldSelector": entry.field_selector}
    items = server.admin("GET", entry.resource, query=query)["items"]
    return {item["metadata"]["name"]: prune(item, entry.fields) for item in items}


def mirrored_objects(mirror: Mirror, resource: Resource) -> dict[str, Object]:
    return {value["metadata"]["name"]: value for value in mirror.all(resource)}


def await_convergence(mirror: Mirror, server: ApiServer, watched: tuple[WatchedResource, ...] = WATCHED) -> None:
    """Wait until the mirror is in sync and equal to the server, with its indexes."""

    def differences() -> str:
        for entry in watched:
            expected, actual = expected_objects(server, entry), mirrored_objects(mirror, entry.resource)
            if expected != actual:
                return f"{entry.resource.name}: expected {expected}, got {actual}"
        return "" if mirror.in_sync else f"out of sync: {mirror.error!r}"

    await_that(lambda: not differences(), differences, timeout_s=60)
    for entry in watched:
        objects = mirror.all(entry.resource)
        for label in {value["metadata"].get("labels", {}).get("shardyard.dev/submission", "") for value in objects}:
            if label:
                of_label = [v for v in objects if v["metadata"]["labels"].get("shardyard.dev/submission") == label]
                assert _by_name(mirror.objects(entry.resource, label)) == _by_name(of_label)
        for uid in {owner["uid"] for v in objects for owner in v["metadata"].get("ownerReferences", ())}:
            of_owner = [v for v in objects if uid in [o["uid"] for o in v["metadata"].get("ownerReferences", ())]]
            assert _by_name(mirror.owned(entry.resource, uid)) == _by_name(of_owner)


def _by_name(objects: Any) -> dict[str, Object]:
    return {value["metadata"]["name"]: value for value in objects}


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    require_definitions()
    with ApiServer(tmp_path_factory.mktemp("mirror"), bookmark_s=0.2) as server:
        yield server


@pytest.fixture
def api_server(module_server: ApiServer) -> ApiServer:
    """Empty server that a test may kill: starting one takes most of a test's time."""
    if not module_server.is_running:
        module_server.start()
    empty(module_server)
    return module_server


def empty(server: ApiServer) -> None:
    server.heal()
    for resource in (PODS, RAY_JOBS, EVENTS, WORKLOADS):
        for name in server.objects(resource):
            server.admin("DELETE", resource, name)
    server.forget_requests()


@pytest.fixture
def start(api_server: ApiServer) -> Iterator[Callable[..., Mirror]]:
    """Starts mirrors, which are closed after the test."""
    mirrors: list[tuple[Mirror, KubernetesApi]] = []

    def start_mirror(*watched: WatchedResource, **options: Any) -> Mirror:
        api = api_server.api()
        mirror = Mirror(api, watched or WATCHED, backoff=FAST, **options)
        mirrors.append((mirror, api))
        mirror.start()
        return mirror

    yield start_mirror
    for mirror, api in mirrors:
        mirror.close()
        api.close()


def lists(server: ApiServer) -> list[str]:
    return [r["resource"] for r in server.requests() if r["verb"] == "list"]


def test_objects_are_found_by_submission_owner_and_event(api_server: ApiServer, start: Callable[..., Mirror]) -> None:
    job = api_server.admin("POST", RAY_JOBS, body=ray_job("j1", "s1"))
    worker = api_server.admin("POST", PODS, body=pod("p1", "s1", owner=job))
    changed: list[tuple[str, str]] = []
    mirror = start(
        *WATCHED, WATCHED_KUEUE, on_change=lambda resource, submission: changed.append((resource.plural, submission))
    )
    await_convergence(mirror, api_server, (*WATCHED, WATCHED_KUEUE))
    assert mirror.has_listed
    workload = {"metadata": {"name": "w1", "ownerReferences": [reference(job)]}, "spec": {"queueName": "gpus"}}
    api_server.admin("POST", WORKLOADS, body=workload)
    for index in range(10):
        api_server.admin("POST", EVENTS, body=event(f"e{index}", worker, "FailedScheduling", f"no room {index}"))
    api_server.admin("POST", EVENTS, body=event("normal", worker, "Pulled", "image pulled", type="Normal"))
    uid = worker["metadata"]["uid"]
    await_that(lambda: "no room 9" in [e["message"] for e in mirror.events(uid)])
    assert [e["message"] for e in mirror.events(uid)] == [f"no room {index}" for index in range(2, 10)]
    assert [w["metadata"]["name"] for w in mirror.owned(WORKLOADS, job["metadata"]["uid"])] == ["w1"]
    assert [p["metadata"]["name"] for p in mirror.objects(PODS, "s1")] == ["p1"]
    assert {("workloads", "s1"), ("events", "s1")} <= set(changed), "they are told with the label of their object"
    (container,) = mirror.objects(PODS, "s1")[0]["spec"]["containers"]
    assert container["resources"]["limits"]["memory"] == "16Gi"
    assert mirror.get(RAY_JOBS, "absent") is None
    assert mirror.objects(PODS, "absent") == ()


def test_one_list_serves_a_watch_that_ends_breaks_and_reconnects(
    api_server: ApiServer, start: Callable[..., Mirror]
) -> None:
    mirror = start()
    await_convergence(mirror, api_server)
    for index in range(3):
        api_server.fault("break_watch")
        api_server.admin("POST", PODS, body=pod(f"p{index}", "s1"))
        await_convergence(mirror, api_server)
    assert sorted(lists(api_server)) == sorted(RESOURCES[name].plural for name in RESOURCES)


def test_a_quiet_watch_outlives_a_compaction_by_its_bookmarks(
    api_server: ApiServer, start: Callable[..., Mirror]
) -> None:
    mirror = start()
    await_convergence(mirror, api_server)
    api_server.admin("POST", PODS, body=pod("other", "s1"))  # RayJobs learn the new version by a bookmark alone
    api_server.await_bookmarks(num_watches=len(WATCHED))
    api_server.compact()
    api_server.forget_requests()
    api_server.fault("break_watch")
    api_server.admin("POST", RAY_JOBS, body=ray_job("after", "s1"))
    await_convergence(mirror, api_server)
    assert lists(api_server) == []


def test_an_expired_watch_lists_again_and_misses_nothing(api_server: ApiServer, start: Callable[..., Mirror]) -> None:
    changed: list[tuple[str, str]] = []
    api_server.admin("POST", PODS, body=pod("p1", "s1"))
    mirror = start(on_change=lambda resource, submission: changed.append((resource.plural, submission)))
    await_convergence(mirror, api_server)
    api_server.forget_requests()
    api_server.fault("status", verb="watch", user=CONTROLLER, code=503, count=10_000)
    api_server.fault("break_watch")
    await_that(lambda: not mirror.in_sync)
    changed.clear()
    api_server.admin("DELETE", PODS, "p1")
    api_server.admin("POST", PODS, body=pod("p2", "s2"))
    api_server.compact()
    api_server.heal()
    await_convergence(mirror, api_server)
    assert set(changed) == {("pods", "s1"), ("pods", "s2")}
    assert lists(api_server).count("pods") == 1


@pytest.mark.parametrize("verb", ["list", "watch"])
def test_a_response_of_another_server_ends_no_watch(
    verb: str, api_server: ApiServer, start: Callable[..., Mirror]
) -> None:
    """A proxy on the way may answer in place of the API server, with code 200."""
    api_server.fault("status", verb=verb, resource="pods", user=CONTROLLER, code=200, count=2)
    mirror = start()
    api_server.admin("POST", PODS, body=pod("p1", "s1"))
    await_convergence(mirror, api_server)


def test_a_server_that_is_away_is_told_since_when(api_server: ApiServer, start: Callable[..., Mirror]) -> None:
    now_s = [100.0]
    mirror = start(clock=lambda: now_s[0])
    assert mirror.out_of_sync_since in (None, 100.0)
    await_convergence(mirror, api_server)
    assert mirror.out_of_sync_since is None
    assert mirror.error is None
    now_s[0] = 200.0
    api_server.kill()
    await_that(lambda: mirror.error is not None)
    now_s[0] = 300.0
    assert mirror.out_of_sync_since == 200.0
    assert mirror.has_listed, "what is known stays readable"
    await_that(lambda: api_server.url in str(mirror.error))
    api_server.start()
    await_convergence(mirror, api_server)


def test_missing_rights_and_definitions_are_told(tmp_path: Path) -> None:
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    with ApiServer(tmp_path, rules=rules, definitions=()) as server:
        for entry, error in ((FIELDS[PODS], Forbidden), (FIELDS[RAY_JOBS], NotFound)):
            api = server.api()
            mirror = Mirror(api, [entry], backoff=FAST)
            mirror.start()
            await_that(lambda mirror=mirror: mirror.error is not None)  # type: ignore[misc]
            assert isinstance(mirror.error, error)
            assert not mirror.in_sync
            mirror.close()
            api.close()


def test_closing_ends_the_threads_also_while_a_watch_is_quiet(api_server: ApiServer) -> None:
    api = api_server.api()
    mirror = Mirror(api)
    mirror.start()
    await_convergence(mirror, api_server)
    names = {f"watch-{resource.plural}" for resource in RESOURCES.values()}
    assert names <= {thread.name for thread in threading.enumerate()}
    mirror.close()
    api.close()
    assert not names & {thread.name for thread in threading.enumerate()}


def test_closing_ends_the_threads_also_while_the_server_is_away(api_server: ApiServer) -> None:
    api = api_server.api(retry=RetryPolicy(backoff=Backoff(first_s=60, longest_s=60), patience_s=600))
    api_server.kill()
    mirror = Mirror(api)
    mirror.start()
    api.close()
    mirror.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("watch-")]


class MirrorMachine(RuleBasedStateMachine):
    """Random writes and faults, after which the mirror equals the server, having listed only where it had to."""

    server: ApiServer

    @initialize()
    def begin(self) -> None:
        empty(self.server)
        self.is_restarted = False
        self.lists = dict.fromkeys(RESOURCES.values(), 0)
        self.expirations = dict.fromkeys(RESOURCES.values(), 0)
        self.snapshots: dict[tuple[Resource, str], dict[str, Object]] = {}
        self.api = self.server.api()
        self.mirror = Mirror(self.api, on_change=self.note_change, backoff=FAST)
        self.mirror.start()

    def note_change(self, resource: Resource, submission: str) -> None:
        # What a controller does: it looks at what changed, once it is told.
        self.snapshots[resource, submission] = _by_name(self.mirror.objects(resource, submission))

    @rule(name=st.sampled_from("abcd"), submission=st.sampled_from(["", "s1", "s2"]))
    def put_pod(self, name: str, submission: str) -> None:
        self._put(PODS, pod(name, submission))

    @rule(name=st.sampled_from("abcd"), submission=st.sampled_from(["s1", "s2"]), suspend=st.booleans())
    def put_ray_job(self, name: str, submission: str, suspend: bool) -> None:
        self._put(RAY_JOBS, ray_job(name, submission, suspend=suspend))

    def _put(self, resource: Resource, manifest: Object) -> None:
        """Create the object, or give an existing one its labels, which may move it out of an index."""
        name = manifest["metadata"]["name"]
        query = {"fieldManager": "test", "force": "true"}
        self.server.admin("PATCH", resource, name, manifest, query=query, content_type="application/apply-patch+yaml")

    @rule(name=st.sampled_from("abcd"), phase=st.sampled_from(["Pending", "Running", "Failed"]))
    def set_phase(self, name: str, phase: str) -> None:
        if name in self.server.objects(PODS):
            self.server.set_status(PODS, name, {"phase": phase})

    @rule(name=st.sampled_from("abcd"), resource=st.sampled_from([PODS, RAY_JOBS]))
    def take_out_of_the_selector(self, name: str, resource: Resource) -> None:
        if name in self.server.objects(resource):
            patch = {"metadata": {"labels": {"app.kubernetes.io/part-of": "another"}}}
            self.server.admin("PATCH", resource, name, patch, content_type="application/merge-patch+json")

    @rule(name=st.sampled_from("abcd"), resource=st.sampled_from([PODS, RAY_JOBS]))
    def delete(self, name: str, resource: Resource) -> None:
        if name in self.server.objects(resource):
            self.server.admin("DELETE", resource, name)

    @rule(about=st.sampled_from("abcd"), number=st.integers(0, 20), type=st.sampled_from(["Warning", "Normal"]))
    def tell_event(self, about: str, number: int, type: str) -> None:
        pods = self.server.objects(PODS)
        if about in pods and f"e{number}" not in self.server.objects(EVENTS):
            self.server.admin("POST", EVENTS, body=event(f"e{number}", pods[about], "Failed", "message", type))

    @rule()
    def compact(self) -> None:
        self.server.compact()

    @rule(kind=st.sampled_from(["break_watch", "expire_watch"]))
    def end_watches(self, kind: Any) -> None:
        self.server.fault(kind)

    @rule(verb=st.sampled_from(["list", "watch"]), kind=st.sampled_from(["status", "drop", "drop_response"]))
    def fail_requests(self, verb: str, kind: Any) -> None:
        self.server.fault(kind, verb=verb, user=CONTROLLER, code=503, count=2)

    @rule()
    @precondition(lambda self: not self.is_restarted)
    def restart(self) -> None:
        self.is_restarted = True  # once in an example: a start takes a second
        self._count_lists(self.server.crash())
        self.server.start()

    @rule()
    def converge(self) -> None:
        await_convergence(self.mirror, self.server)
        for resource in (PODS, RAY_JOBS):
            for submission in ("s1", "s2"):
                last = self.snapshots.get((resource, submission), {})
                assert last == _by_name(self.mirror.objects(resource, submission)), "a change was not told"

    def _count_lists(self, requests: list[Object]) -> None:
        for resource in RESOURCES.values():
            of_resource = [r for r in requests if r["resource"] == resource.plural]
            self.lists[resource] += sum(r["verb"] == "list" and r["code"] == 200 for r in of_resource)
            self.expirations[resource] += sum(r["code"] == 410 for r in of_resource)

    def teardown(self) -> None:
        try:
            self.server.heal()
            self.converge()
            self._count_lists(self.server.requests())
            for resource, num_lists in self.lists.items():
                assert num_lists <= 1 + self.expirations[resource], f"needless lists of {resource.name}"
        finally:
            self.mirror.close()
            self.api.close()


def run_machine(server: ApiServer, examples: int) -> None:
    class Machine(MirrorMachine):
        pass

    Machine.server = server
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            # Shrinking would restart the server for minutes.
            phases=[Phase.generate],
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("examples", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_the_mirror_converges_whatever_happens(api_server: ApiServer, examples: int) -> None:
    run_machine(api_server, examples)
