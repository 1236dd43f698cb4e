"""The client against a real server over real sockets: retries, time-outs, and errors by what a caller does."""

import pickle
import socket
import sys
from pathlib import Path

import pytest

from service.control.kubernetes import (
    EVENTS,
    LOCAL_QUEUES,
    PODS,
    RAY_CLUSTERS,
    RAY_JOBS,
    Cause,
    Conflict,
    Connection,
    Forbidden,
    Gone,
    Invalid,
    KubernetesApi,
    KubernetesError,
    Misconfigured,
    NotFound,
    Resource,
    Unavailable,
)
from service.control.kubernetes.retry import Backoff, RetryPolicy
from tests.kubernetes.api_server import CONTROLLER_TOKEN, ApiServer
from tests.kubernetes.apiserver.faults import Denial
from tests.kubernetes.objects import pod, ray_job

READ_JOBS = [{"apiGroups": ["ray.io"], "resources": ["rayjobs"], "verbs": ["get", "list", "watch"]}]


def test_an_applied_object_is_read_patched_and_deleted(api: KubernetesApi) -> None:
    applied = api.apply(RAY_JOBS, ray_job("one", suspend=True))
    assert applied["metadata"]["managedFields"][0]["manager"] == "shardyard"
    assert api.get(RAY_JOBS, "one") == applied
    assert api.patch(RAY_JOBS, "one", {"spec": {"suspend": False}})["spec"]["suspend"] is False
    assert api.delete(RAY_JOBS, "one") is True
    assert api.delete(RAY_JOBS, "one") is False
    with pytest.raises(NotFound, match='"one" not found'):
        api.get(RAY_JOBS, "one")


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
def test_a_busy_server_is_asked_again(api: KubernetesApi, shared_server: ApiServer, code: int) -> None:
    shared_server.forget_requests()
    shared_server.fault("status", verb="patch", code=code, count=2, retry_after_s=0)
    api.apply(RAY_JOBS, ray_job(f"busy-{code}"))
    assert [r["code"] for r in shared_server.requests()] == [code, code, 200]


def test_a_write_whose_version_was_overtaken_is_repeated(api: KubernetesApi, shared_server: ApiServer) -> None:
    shared_server.forget_requests()
    message = (
        'Operation cannot be fulfilled on rayjobs.ray.io "x": the object has been modified; please apply your changes'
    )
    shared_server.fault("status", verb="patch", code=409, reason="Conflict", message=message)
    api.apply(RAY_JOBS, ray_job("overtaken"))
    assert [r["code"] for r in shared_server.requests()] == [409, 200]


@pytest.mark.parametrize("kind", ["drop", "drop_response"])
def test_a_lost_connection_creates_nothing_twice(api: KubernetesApi, shared_server: ApiServer, kind: str) -> None:
    shared_server.fault(kind, verb="patch")
    name = f"lost-{kind.replace('_', '-')}"
    applied = api.apply(RAY_JOBS, ray_job(name))
    assert shared_server.objects(RAY_JOBS)[name]["metadata"]["uid"] == applied["metadata"]["uid"]
    assert applied["metadata"]["generation"] == 1


def test_a_create_whose_response_was_lost_says_that_the_object_exists(
    api: KubernetesApi, shared_server: ApiServer
) -> None:
    shared_server.fault("drop_response", verb="create")
    with pytest.raises(Conflict) as refusal:
        api.create(RAY_JOBS, ray_job("created"))
    assert refusal.value.reason == "AlreadyExists"
    assert "created" in shared_server.objects(RAY_JOBS)


def test_a_delete_whose_response_was_lost_is_done(api: KubernetesApi, shared_server: ApiServer) -> None:
    api.apply(RAY_JOBS, ray_job("gone"))
    shared_server.fault("drop_response", verb="delete")
    assert api.delete(RAY_JOBS, "gone") is False, "the repetition finds nothing"
    assert "gone" not in shared_server.objects(RAY_JOBS)


def test_a_slow_server_is_given_up(shared_server: ApiServer) -> None:
    api = shared_server.api(timeout_s=0.2, retry=RetryPolicy(attempts=2, backoff=Backoff(first_s=0.01)))
    shared_server.fault("delay", verb="get", count=2, seconds=20)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1"):
        api.get(RAY_JOBS, "any")
    with pytest.raises(NotFound):
        api.get(RAY_JOBS, "any")
    api.close()


def test_a_server_that_is_away_is_unavailable_until_it_is_back(api_server: ApiServer) -> None:
    api = api_server.api()
    uid = api.apply(RAY_JOBS, ray_job("kept"))["metadata"]["uid"]
    api_server.kill()
    with pytest.raises(Unavailable, match="does not answer"):
        api.get(RAY_JOBS, "kept")
    api_server.start()
    assert api.get(RAY_JOBS, "kept")["metadata"]["uid"] == uid
    api.close()


def test_an_object_of_another_uid_is_not_deleted(api: KubernetesApi) -> None:
    old = api.apply(RAY_JOBS, ray_job("again"))
    api.delete(RAY_JOBS, "again", uid=old["metadata"]["uid"])
    new = api.apply(RAY_JOBS, ray_job("again"))
    assert api.delete(RAY_JOBS, "again", uid=old["metadata"]["uid"]) is False
    assert api.get(RAY_JOBS, "again")["metadata"]["uid"] == new["metadata"]["uid"]


def test_a_field_of_another_manager_conflicts(api: KubernetesApi, shared_server: ApiServer) -> None:
    shared_server.admin(
        "PATCH",
        RAY_JOBS,
        "queued",
        ray_job("queued", suspend=True),
        query={"fieldManager": "kueue"},
        content_type="application/apply-patch+yaml",
    )
    shared_server.forget_requests()
    with pytest.raises(Conflict, match=r'"kueue".*\.spec\.suspend'):
        api.apply(RAY_JOBS, ray_job("queued", suspend=False))
    assert len(shared_server.requests()) == 1, "no repetition would help"
    assert api.apply(RAY_JOBS, ray_job("queued", suspend=False), force=True)["spec"]["suspend"] is False


def test_pages_show_one_version_of_the_collection(api: KubernetesApi, shared_server: ApiServer) -> None:
    for index in range(5):
        shared_server.admin("POST", PODS, body=pod(f"page-{index}", "pages"))
    selector = "shardyard.dev/submission=pages"
    first = api.list_page(PODS, selector=selector, limit=2)
    shared_server.admin("DELETE", PODS, "page-3")
    second = api.list_page(PODS, selector=selector, limit=2, cursor=first.cursor)
    third = api.list_page(PODS, selector=selector, limit=2, cursor=second.cursor)
    names = [item["metadata"]["name"] for page in (first, second, third) for item in page.items]
    assert names == [f"page-{index}" for index in range(5)]
    assert {page.resource_version for page in (first, second, third)} == {first.resource_version}
    assert third.cursor == ""


def test_an_expired_cursor_and_an_expired_version_are_gone(api: KubernetesApi, shared_server: ApiServer) -> None:
    for index in range(2):
        shared_server.admin("POST", PODS, body=pod(f"expired-{index}", "expired"))
    page = api.list_page(PODS, selector="shardyard.dev/submission=expired", limit=1)
    shared_server.admin("DELETE", PODS, "expired-0")
    shared_server.compact()
    with pytest.raises(Gone):
        api.list_page(PODS, selector="shardyard.dev/submission=expired", limit=1, cursor=page.cursor)
    with pytest.raises(Gone):
        list(api.watch(PODS, page.resource_version))


def test_a_watch_tells_changes_in_order_and_ends_with_a_bookmark(api: KubernetesApi, shared_server: ApiServer) -> None:
    version = api.list_page(PODS).resource_version
    shared_server.admin("POST", PODS, body=pod("seen", "seen"))
    shared_server.set_status(PODS, "seen", {"phase": "Running"})
    shared_server.admin("POST", PODS, body=pod("unseen", "unseen"))
    shared_server.admin("DELETE", PODS, "seen")
    events = list(api.watch(PODS, version, selector="shardyard.dev/submission=seen", timeout_s=1))
    assert [e.type for e in events if e.type != "BOOKMARK"] == ["ADDED", "MODIFIED", "DELETED"]
    assert events[-1].type == "BOOKMARK"
    versions = [int(event.resource_version) for event in events]
    assert versions == sorted(versions)


def test_a_closed_watch_ends(api: KubernetesApi) -> None:
    watch = api.watch(PODS, api.list_page(PODS).resource_version)
    watch.close()
    assert list(watch) == []


def test_a_broken_watch_is_unavailable(api: KubernetesApi, shared_server: ApiServer) -> None:
    shared_server.fault("break_watch")
    watch = api.watch(EVENTS, api.list_page(EVENTS).resource_version)
    shared_server.fault("break_watch")
    with pytest.raises(Unavailable, match="events"):
        list(watch)


def test_a_silent_watch_is_unavailable(tmp_path: Path) -> None:
    with ApiServer(tmp_path, bookmark_s=60, definitions=()) as server:
        api = server.api()
        with pytest.raises(Unavailable, match="pods"):
            list(api.watch(PODS, api.list_page(PODS).resource_version, idle_s=0.3))
        api.close()


def test_missing_rights_name_the_verb_and_the_resource(tmp_path: Path) -> None:
    with ApiServer(tmp_path, rules=READ_JOBS) as server:
        api = server.api()
        api.list_page(RAY_JOBS)
        with pytest.raises(Forbidden) as refusal:
            api.apply(RAY_JOBS, ray_job("denied"))
        assert (refusal.value.verb, refusal.value.resource) == ("patch", "rayjobs.ray.io")
        assert 'cannot patch resource "rayjobs" in API group "ray.io" in the namespace "shardyard"' in str(
            refusal.value
        )
        with pytest.raises(Forbidden, match='cannot watch resource "pods"'):
            api.watch(PODS, "1")
        assert [(r["verb"], r["resource"], r["code"]) for r in server.requests()] == [
            ("list", "rayjobs", 200),
            ("patch", "rayjobs", 403),
            ("watch", "pods", 403),
        ]
        api.close()


@pytest.mark.parametrize(
    ("denial", "rule", "words"),
    [
        (
            Denial("rayjobs", "only the team's images", webhook="policy.example.com"),
            "webhook",
            "only the team's images",
        ),
        (Denial("rayjobs", "exceeded quota: jobs, requested: 1, used: 9, limited: 9"), "quota", "limited: 9"),
        (Denial("rayjobs", 'violates PodSecurity "restricted:latest"'), "admission", "restricted:latest"),
    ],
)
def test_a_denial_is_told_in_the_words_of_its_maker(
    api: KubernetesApi, shared_server: ApiServer, denial: Denial, rule: str, words: str
) -> None:
    shared_server.deny(denial)
    with pytest.raises(Invalid) as refusal:
        api.apply(RAY_JOBS, ray_job(f"denied-by-{rule}"))
    assert refusal.value.rule == rule
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"suspended": True}, "spec.suspended"),
        ({"backoffLimit": "none"}, "spec.backoffLimit"),
        ({"deletionStrategy": {}}, "spec.deletionStrategy"),
    ],
)
def test_a_refused_object_names_the_field(api: KubernetesApi, spec: dict[str, object], field: str) -> None:
    for send in (api.apply, api.create):
        with pytest.raises(Invalid) as refusal:
            send(RAY_JOBS, ray_job("refused", **spec))
        assert refusal.value.rule == "schema"
        assert field in [cause.field for cause in refusal.value.causes]


def test_a_resource_that_is_not_served_names_its_definitions(api: KubernetesApi, shared_server: ApiServer) -> None:
    with pytest.raises(NotFound, match=r"does not serve jobs\.batch\.volcano\.sh.*CRDs"):
        api.list_page(Resource("batch.volcano.sh", "v1alpha1", "jobs", "Job"))
    other = shared_server.api(namespace="absent")
    with pytest.raises(NotFound, match='namespaces "absent" not found'):
        other.create(LOCAL_QUEUES, {"metadata": {"name": "queue"}})
    other.close()


def test_wrong_credentials_are_told(shared_server: ApiServer, tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(shared_server.kubeconfig().read_text().replace(CONTROLLER_TOKEN, "of-another-cluster"))
    api = KubernetesApi(Connection.open(path))
    with pytest.raises(Forbidden, match="does not accept the credentials"):
        api.list_page(RAY_CLUSTERS)
    api.close()


def test_a_service_account_whose_token_rotates(
    shared_server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, port = shared_server.url.removeprefix("https://").split(":")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    (tmp_path / "ca.crt").write_text(shared_server.certificate.read_text())
    (tmp_path / "namespace").write_text("shardyard")
    (tmp_path / "token").write_text("expired\n")
    api = KubernetesApi(Connection.open(service_account=tmp_path))
    assert api.namespace == "shardyard"
    with pytest.raises(Forbidden):
        api.list_page(RAY_JOBS)
    (tmp_path / "token").write_text(f"{CONTROLLER_TOKEN}\n")
    api.list_page(RAY_JOBS)
    api.close()


def test_missing_credentials_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(Misconfigured, match="kubeconfig"):
        Connection.open(service_account=tmp_path)
    with pytest.raises(Misconfigured, match="absent"):
        Connection.open(tmp_path / "absent")
    (tmp_path / "broken").write_text("clusters: {")
    with pytest.raises(Misconfigured, match="broken"):
        Connection.open(tmp_path / "broken")


def test_a_certificate_of_another_authority_is_refused(shared_server: ApiServer, tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(shared_server.kubeconfig().read_text().replace('"certificate-authority"', '"proxy-url-unused"'))
    api = KubernetesApi(Connection.open(path), retry=RetryPolicy(attempts=1))
    with pytest.raises(Unavailable, match="certificate"):
        api.get(RAY_JOBS, "any")
    api.close()


def test_an_unreachable_address_is_unavailable(shared_server: ApiServer, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    path = tmp_path / "kubeconfig"
    path.write_text(shared_server.kubeconfig().read_text().replace(shared_server.url, f"https://127.0.0.1:{port}"))
    api = KubernetesApi(Connection.open(path), retry=RetryPolicy(attempts=1))
    with pytest.raises(Unavailable, match=str(port)):
        api.get(RAY_JOBS, "any")
    api.close()


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("away", 1.5),
        Forbidden("no", "get", "pods"),
        Conflict("twice", "AlreadyExists"),
        Invalid("wrong", "schema", (Cause("spec", "wrong"),)),
        Gone("old"),
        NotFound("absent"),
        Misconfigured("no token"),
    ],
)
def test_errors_cross_process_boundaries(error: KubernetesError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.__dict__) == (type(error), str(error), error.__dict__)


@pytest.mark.parametrize(
    ("error", "attempt", "elapsed_s", "delay_s"),
    [
        (Unavailable("away"), 0, 0.0, 0.2),
        (Unavailable("away"), 2, 0.0, 0.8),
        (Unavailable("busy", 3.0), 0, 0.0, 3.0),
        (Unavailable("busy", 3.0), 0, 18.0, None),
        (Unavailable("away"), 4, 0.0, None),
        (Conflict("the object has been modified"), 0, 0.0, 0.2),
        (Conflict("Apply failed with 1 conflict"), 0, 0.0, None),
        (Conflict("exists", "AlreadyExists"), 0, 0.0, None),
        (Invalid("wrong", "schema"), 0, 0.0, None),
        (Forbidden("no", "get", "pods"), 0, 0.0, None),
    ],
)
def test_delays_of_attempts(error: KubernetesError, attempt: int, elapsed_s: float, delay_s: float | None) -> None:
    assert RetryPolicy().delay_s(error, attempt, elapsed_s, 0.0) == delay_s


def test_a_missing_client_is_told_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Stands for an installation without the extra: this one has it.
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(Misconfigured, match=r"pip install 'shardyard\[kubernetes\]'"):
        Connection.open(tmp_path / "kubeconfig")
