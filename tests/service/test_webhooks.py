"""Webhooks to real receivers: signed, repeated until they arrive, through kills of the control plane."""

import asyncio
import base64
import ipaddress
import json
import re
import sqlite3
import ssl
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.control.api.services import Services
from service.control.webhooks.addresses import AddressRule
from service.control.webhooks.sender import Sender
from service.wire.webhooks import WebhookOptions, WebhookSpec, shown_url
from tests.kubernetes.certificate import write_certificate
from tests.processes import await_that
from tests.service.control_plane import ControlPlane, spec
from tests.service.controllers import controller_on, local_cluster, submit_job
from tests.service.receiver import Receiver, receiver
from tests.service.silent_run import Run, checkpoint, record
from tests.service_cli.command import ROOT
from tests.service_cli.command import shardyard as run_command

LOOPBACK = {"webhook_networks": ["127.0.0.0/8"], "webhook_interval_s": 0.05, "webhook_retry_s": 0.05}
LIFE = ["queued", "starting", "running", "succeeded"]


def documented_verify() -> Callable[[str, dict[str, str], bytes], None]:
    """The function of the documentation by which receivers verify."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "webhooks.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["verify"]


def add(plane: ControlPlane, to: Receiver, name: str = "hook", **options: Any) -> dict[str, Any]:
    answer = plane.http.post("/v1/webhooks", json={"name": name, "url": to.url, **options})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def deliveries(plane: ControlPlane, name: str = "hook", **query: Any) -> list[dict[str, Any]]:
    return list(plane.http.get(f"/v1/webhooks/{name}/deliveries", params=query).json()["items"])


def await_delivered(plane: ControlPlane, number: int, name: str = "hook") -> None:
    await_that(
        lambda: len(deliveries(plane, name, state="delivered")) >= number,
        lambda: json.dumps(deliveries(plane, name), indent=1) + plane.log_text()[-2000:],
    )


def test_a_receiver_gets_each_change_of_state_once_signed(own_plane: ControlPlane) -> None:
    """The recipe of the documentation accepts each delivery, and no changed, late or foreign one."""
    verify = documented_verify()
    own_plane.start(**LOOPBACK)
    with receiver() as to:
        secret = add(own_plane, to)["secret"]
        job_id = own_plane.finished_job(labels={"team": "research"})["id"]
        await_delivered(own_plane, len(LIFE))
        assert to.states() == LIFE
        for request in to.received:
            verify(secret, request.headers, request.body)
            with pytest.raises(ValueError):
                verify(secret, request.headers, request.body + b" ")
            with pytest.raises(ValueError):
                verify(secret, {**request.headers, "webhook-timestamp": "1700000000"}, request.body)
            with pytest.raises(ValueError):
                verify("whsec_" + base64.b64encode(bytes(32)).decode(), request.headers, request.body)
        last = to.received[-1].content
        assert last["type"] == "job.state"
        assert last["data"]["job"] | {"created_at": ""} == {
            "id": job_id, "name": "small", "owner": "local", "labels": {"team": "research"}, "attempt": 1, "step": 5,
            "num_steps": 5, "created_at": "",
        }  # fmt: skip
        event_ids = [event.id for event in own_plane.events(job_id) if event.kind == "state"]
        assert {request.content["data"]["event_id"] for request in to.received} <= set(event_ids)
        shown = own_plane.http.get("/v1/webhooks").text + own_plane.http.get("/v1/webhooks/hook").text
        assert secret not in shown


MISBEHAVIOURS = {
    "500, then 200": (lambda handler, number: handler.answer(500 if number < 3 else 200, b"busy"), 3),
    "hangs, then 200": (lambda handler, number: handler.hang() if number == 1 else handler.answer(200), 2),
    "closes early": (lambda handler, number: handler.close_early() if number < 3 else handler.answer(204, b""), 3),
    "endless headers": (lambda handler, number: handler.trickle_headers() if number == 1 else handler.answer(200), 2),
    "endless body": (lambda handler, _: handler.stream_forever(), 1),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MISBEHAVIOURS)
def test_what_a_receiver_refuses_is_sent_again(own_plane: ControlPlane, name: str) -> None:
    """One slow or failing receiver, beside one that works and is not held up."""
    behave, num_attempts = MISBEHAVIOURS[name]
    own_plane.start(**LOOPBACK, webhook_timeout_s=0.5)
    with receiver(behave) as bad, receiver() as good:
        add(own_plane, bad, "bad", states=["queued"])
        add(own_plane, good, "good")
        own_plane.finished_job()
        await_delivered(own_plane, len(LIFE), "good")
        await_delivered(own_plane, 1, "bad")
    (delivery,) = deliveries(own_plane, "bad")
    assert delivery["attempts"] == num_attempts
    assert {entry.id for entry in bad.received} == {delivery["id"]}
    assert {entry.body for entry in bad.received} == {bad.received[0].body}
    assert len(delivery["last_attempt"]["response"]) <= 500


def test_a_hanging_receiver_does_not_delay_another(own_plane: ControlPlane) -> None:
    """It hangs until all of the other's are delivered."""
    own_plane.start(**LOOPBACK, webhook_timeout_s=200.0)
    with receiver(lambda handler, _: handler.hang()) as bad, receiver() as good:
        add(own_plane, bad, "bad")
        own_plane.post()
        await_that(lambda: len(bad.received) == 1)
        add(own_plane, good, "good")
        own_plane.finished_job()
        await_delivered(own_plane, len(LIFE), "good")
        assert len(bad.received) == 1


def test_redirects_are_not_followed_and_giving_up_is_explained(own_plane: ControlPlane) -> None:
    own_plane.start(**LOOPBACK, webhook_give_up_s=0.3)
    with receiver() as target, receiver(lambda handler, _: handler.answer(302, Location=target.url)) as to:
        add(own_plane, to, states=["queued"])
        own_plane.post()
        await_that(lambda: [entry["state"] for entry in deliveries(own_plane)] == ["failed"])
        (delivery,) = deliveries(own_plane)
        assert delivery["last_attempt"]["status"] == 302
        assert "redirects are not followed" in delivery["last_attempt"]["error"]
        assert (delivery["next_attempt_at"], delivery["finished_at"] is None) == (None, False)
        assert target.received == []
        to.behave = lambda handler, _: handler.answer(200)
        answer = own_plane.http.post(f"/v1/webhooks/hook/deliveries/{delivery['id']}/repeat")
        assert (answer.status_code, answer.json()["state"]) == (202, "pending")
        await_delivered(own_plane, 1)
        assert {entry.id for entry in to.received} == {delivery["id"]}


def test_every_committed_change_is_delivered_through_kills(own_plane: ControlPlane) -> None:
    """The control plane is killed while jobs change and while attempts are in flight; a receiver refuses at first."""
    own_plane.start(**LOOPBACK)
    with receiver(lambda handler, number: handler.answer(503 if number % 3 == 0 else 200)) as to:
        add(own_plane, to)
        job_ids = []
        for kill in range(3):
            job_ids += [own_plane.post()["id"] for _ in range(3)]
            await_that(lambda kill=kill: len(to.received) > 4 * kill)
            own_plane.kill()
            own_plane.start()
        for job_id in job_ids:
            own_plane.await_state(job_id, "succeeded")
        expected = {
            (job_id, event.id)
            for job_id in job_ids
            for event in own_plane.events(job_id)
            if event.kind == "state" and event.data["state"] != event.data["previous"]
        }
        await_that(lambda: not deliveries(own_plane, state="pending"))
        content = [request.content["data"] for request in to.received]
        assert {(data["job"]["id"], data["event_id"]) for data in content} == expected
        num_ids = len({request.id for request in to.received})
        assert num_ids == len(expected), "one delivery id for each event, also if it came twice"


def test_events_are_chosen_by_type_state_label_and_name(own_plane: ControlPlane) -> None:
    own_plane.start(**LOOPBACK)
    with receiver() as to, receiver() as slack, receiver() as named:
        add(own_plane, to, states=["cancelled"], labels=["hold=hold", "quiet"], events=["job.state", "job.checkpoint"])
        add(own_plane, slack, "slack", format="slack", labels=["other"])
        add(own_plane, named, "named", jobs="named", states=["queued"])
        run = Run(own_plane, notify=["named"])
        run.send(0, record("started", group=0, workers=[]), checkpoint(4), checkpoint(8))
        run.end()
        other = own_plane.finished_job(labels={"other": "a-b"}, name="a.job_x")
        await_delivered(own_plane, 3)
        await_delivered(own_plane, len(LIFE), "slack")
        await_delivered(own_plane, 1, "named")
        types = [(entry.content["type"], entry.content["data"]["checkpoint"]["step"]) for entry in to.received]
        assert types == [("job.checkpoint", 4), ("job.checkpoint", 8), ("job.state", 8)]
        assert to.received[-1].content["data"]["state"] == "cancelled"
        assert [entry.content["data"]["job"]["id"] for entry in named.received] == [run.id]
        message = slack.received[-1].content
        assert set(message) == {"text", "mrkdwn"}
        assert message["text"].startswith(f"a.job_x ({other['id']}) is succeeded at step 5 of 5")


def test_a_webhook_is_added_tested_and_removed_from_the_command_line(own_plane: ControlPlane) -> None:
    own_plane.start(**LOOPBACK)
    with receiver(lambda handler, number: handler.answer(200 if number == 1 else 404, b"no such hook")) as to:

        def shardyard(*words: str, code: int = 0) -> Any:
            done = run_command("webhooks", *words, "--json", url=own_plane.url)
            assert done.returncode == code, done.stderr
            return json.loads(done.stdout)

        shardyard("add", "hook", to.url + "?key=hidden", "--state", "failed", "--label", "team=a")
        host = to.url.removesuffix(urlsplit(to.url).path) + "/"
        (listed,) = shardyard("ls")["items"]
        assert (listed["url"], listed["states"], listed["labels"]) == (f"{host}...dden", ["failed"], ["team=a"])
        assert shardyard("test", "hook")["state"] == "delivered"
        assert not shardyard("disable", "hook")["enabled"]
        failure = shardyard("test", "hook", code=1)
        assert shardyard("ls")["items"][0]["last_delivery"]["id"] == failure["id"]
        assert shardyard("enable", "hook")["enabled"]
        assert (failure["state"], failure["last_attempt"]["status"]) == ("failed", 404)
        assert failure["last_attempt"]["response"] == "no such hook"
        items = shardyard("deliveries", "hook", "-n", "1")["items"]
        assert [item["id"] for item in items] == [failure["id"]]
        assert [entry.content["type"] for entry in to.received] == ["test", "test"]
        shardyard("rm", "hook")
        assert shardyard("ls")["items"] == []
        assert shardyard("test", "hook", code=2)["errors"] == []


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://hooks.slack.com/services/T0/B0/abcdefghWXYZ", "https://hooks.slack.com/...WXYZ"),
        ("https://a.example:8443/hook?token=abcdefgh1234", "https://a.example:8443/...1234"),
        ("https://a.example/short", "https://a.example/..."),
        ("https://a.example?key=1", "https://a.example/..."),
        ("https://a.example/", "https://a.example/"),
        ("https://a.example", "https://a.example"),
    ],
)
def test_a_url_is_shown_without_what_may_be_secret(url: str, expected: str) -> None:
    assert shown_url(url) == expected


def test_a_disabled_webhook_gets_no_events_and_earlier_releases_read_an_enabled_one(own_plane: ControlPlane) -> None:
    own_plane.start(**LOOPBACK)
    with receiver() as to:
        add(own_plane, to)
        assert own_plane.http.post("/v1/webhooks/hook/disable").json()["enabled"] is False
        own_plane.finished_job()
        assert deliveries(own_plane) == []
        assert own_plane.http.post("/v1/webhooks/hook/enable").json()["enabled"] is True
        own_plane.finished_job()
        await_delivered(own_plane, len(LIFE))
    with closing(sqlite3.connect(own_plane.database)) as database:
        (options,) = database.execute("SELECT options FROM webhooks").fetchone()
    assert json.loads(options).keys() == WebhookOptions.model_fields.keys() - {"enabled"}


BAD = {
    "url": [("ftp://a.example/", "invalid_value"), ("https://", "invalid_value"), ("https://u:p@a.b/", "invalid_value"),
            ("http://127.0.0.1/", "not_allowed"), ("http://[::1]/", "not_allowed"),
            ("http://169.254.169.254/", "not_allowed"),
            ("http://[::ffff:10.0.0.1]/", "not_allowed"), ("https://a.example/ b", "invalid_value"), (5, "wrong_type")],
    "name": [("", "invalid_value"), ("a b", "invalid_value")],
    "states": [(["gone"], "not_a_choice")],
    "events": [([], "empty"), (["job.loss"], "not_a_choice")],
    "labels": [(["=a"], "invalid_value")],
    "secret": [("whsec_short", "invalid_value"), ("plain", "invalid_value")],
    "format": [("xml", "not_a_choice")],
    "colour": [("red", "unknown_key")],
}  # fmt: skip


@pytest.mark.parametrize("field", BAD)
def test_a_bad_webhook_is_refused_by_place(plane: ControlPlane, field: str) -> None:
    for value, code in BAD[field]:
        good = {"name": "a", "url": "https://a.example/"}
        answer = plane.http.post("/v1/webhooks", json={**good, field: value})
        assert answer.status_code == 422, (value, answer.text)
        (problem,) = answer.json()["errors"]
        assert (problem["path"].split("[")[0], problem["code"]) == (field, code), value
        assert problem["remedy"]
    assert plane.http.get("/v1/webhooks").json()["items"] == []


def test_names_are_unique_and_jobs_name_webhooks_that_are_there(own_plane: ControlPlane) -> None:
    own_plane.start(**LOOPBACK)
    with receiver() as to:
        add(own_plane, to, "there")
        again = own_plane.http.post("/v1/webhooks", json={"name": "there", "url": to.url})
        assert (again.status_code, again.json()["errors"][0]["path"]) == (409, "name")
    answer = own_plane.http.post("/v1/jobs", json=spec(notify=["there", "absent"]))
    (problem,) = answer.json()["errors"]
    assert (answer.status_code, problem["path"], problem["value"]) == (422, "notify[1]", "absent")
    assert "there" in problem["remedy"]


def test_the_operators_webhooks_are_those_of_the_settings(own_plane: ControlPlane) -> None:
    secret = "whsec_" + base64.b64encode(bytes(range(32))).decode()
    verify = documented_verify()
    with receiver() as to:
        entry = {"name": "ops", "url": to.url, "secret": secret, "states": ["queued"]}
        own_plane.start(**LOOPBACK, webhooks=[entry])
        refusal = own_plane.http.delete("/v1/webhooks/ops")
        assert (refusal.status_code, own_plane.http.get("/v1/webhooks/ops").json()["source"]) == (409, "settings")
        own_plane.post()
        await_delivered(own_plane, 1, "ops")
        verify(secret, to.received[0].headers, to.received[0].body)
        own_plane.terminate()
        own_plane.start(webhooks=[])
        assert own_plane.http.get("/v1/webhooks").json()["items"] == []


def test_a_name_that_resolves_to_this_machine_is_refused_at_the_connection(own_plane: ControlPlane) -> None:
    """Whatever the name resolved to when the webhook was added."""
    own_plane.start()
    with receiver() as to:
        answer = own_plane.http.post(
            "/v1/webhooks", json={"name": "hook", "url": f"http://localhost:{to.server_port}/"}
        )
        assert answer.status_code == 201
        delivery = own_plane.http.post("/v1/webhooks/hook/test").json()
        assert (delivery["state"], delivery["last_attempt"]["status"]) == ("failed", None)
        assert "SHARDYARD_WEBHOOK_NETWORKS" in delivery["last_attempt"]["error"]
        assert to.received == []


def test_only_the_holder_of_the_lease_delivers(tmp_path: Path) -> None:
    """A control plane that has lost the lease, and does not know it yet, begins no attempt."""
    with receiver() as to:
        cluster = local_cluster(tmp_path)
        first = controller_on(tmp_path, cluster, **LOOPBACK)
        first.webhooks.add(WebhookSpec(name="hook", url=to.url), "tester")
        submit_job(first)
        first.controller.step()
        assert first.controller.acting
        second = controller_on(tmp_path, cluster, **LOOPBACK)
        await_that(lambda: (second.controller.step(), second.controller.acting)[1])
        asyncio.run(_deliver(first))
        assert to.received == []
        asyncio.run(_deliver(second))
        assert to.states()[:1] == ["queued"]
        cluster.end_all()
        for services in (first, second):
            services.database.close()


async def _deliver(services: Services) -> None:
    await services.deliveries.step()
    await services.deliveries.finish()


@given(st.one_of(st.ip_addresses(v=4), st.sampled_from([ipaddress.IPv4Address("10.1.2.3"),
       ipaddress.IPv4Address("127.0.0.1"), ipaddress.IPv4Address("8.8.8.8")])))  # fmt: skip
def test_an_address_inside_another_is_judged_by_the_inner_one(address: ipaddress.IPv4Address) -> None:
    rule = AddressRule(["192.168.7.0/24"])
    permitted = rule.permits(address)
    number = int(address)
    for outer in (0xFFFF << 32 | number, 0x0064FF9B << 96 | number, 0x2002 << 112 | number << 80):
        assert rule.permits(ipaddress.IPv6Address(outer)) == permitted
    assert permitted == (address.is_global and not address.is_multicast) or address in ipaddress.ip_network(
        "192.168.7.0/24"
    )


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1", "172.16.0.1", "192.168.1.1", "127.0.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1",
     "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "64:ff9b::a00:1",
     "fec0::1", "::127.0.0.1", "64:ff9b:1::7f00:1", "5f00::1", "::ffff:0:10.0.0.1"],
)  # fmt: skip
def test_addresses_of_this_network_are_refused(address: str) -> None:
    assert not AddressRule([]).permits(ipaddress.ip_address(address))


@pytest.mark.parametrize(("host", "is_delivered"), [("127.0.0.1", True), ("[::ffff:127.0.0.1]", False)])
def test_tls_is_verified_by_the_name_in_the_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, is_delivered: bool
) -> None:
    """Although connections are made to an address; the certificate is 127.0.0.1's."""
    certificate, key = write_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    sender = Sender(AddressRule(["127.0.0.0/8"]), timeout_s=20.0)
    with receiver() as to:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
        to.socket = context.wrap_socket(to.socket, server_side=True)
        attempt = asyncio.run(sender.send(f"https://{host}:{to.server_port}/", {}, b"{}"))
    assert (attempt.status, attempt.is_delivered) == (200 if is_delivered else None, is_delivered), attempt
