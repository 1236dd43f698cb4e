"""Answers of a control plane to a fixed sequence of requests, without ids, times, ports, codes and wording."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from benchmarks.digests.item import Item, Items
from benchmarks.digests.mask import mask_json, masked_plan
from benchmarks.digests.schema import of_api, without_prose
from tests.service.control_plane import ControlPlane, spec

BAD_SPECS: dict[str, Any] = json.loads(Path(__file__).with_name("bad_specs.json").read_text())
HEADERS = ("content-type", "location", "retry-after", "accept-ranges", "content-range", "allow")
H100 = {"num_nodes": 1, "devices_per_node": 8, "device": "h100"}
JSON = {"content-type": "application/json"}
YAML = {"content-type": "application/yaml"}
BODIES: dict[str, tuple[str, dict[str, str]]] = {
    "nothing": ("", JSON),
    "torn JSON": ('{"model": ', JSON),
    "a list": ("[1, 2]", JSON),
    "a number": ("7", JSON),
    "a key twice": ('{"model": 1, "model": 2}', JSON),
    "deep JSON": ("[" * 3000, JSON),
    "a lone surrogate": ('{"name": "\\ud800"}', JSON),
    "bad YAML": ("model: [", YAML),
    "a YAML list": ("- 1", YAML),
    "too large": ("x" * 1_100_000, YAML),
    "text": ("model", {"content-type": "text/plain"}),
}
PLANS: dict[str, Any] = {
    "a spec": spec(),
    "elastic": {"spec": spec(resources={"min_workers": 1, "max_workers": 8}), "num_workers": 4},
    "8 H100": {"spec": spec(train={"num_steps": 5, "batch_tokens": 65536}), "cluster": H100},
    "two pipeline stages": {"spec": spec(parallel={"pipeline": 2}, resources={"num_workers": 2}), "cluster": H100},
    "a large model": {"spec": spec(model={"preset": "qwen3-30b-a3b"}, data={"corpus": "synthetic"}), "cluster": H100},
    "an unknown key": {"spec": spec(), "clutser": {}},
    "no workers": {"spec": spec(), "num_workers": 0},
    "half a cluster": {"spec": spec(), "cluster": {"num_nodes": 1}},
    "no nodes": {"spec": spec(), "cluster": {"num_nodes": 0, "devices_per_node": 1, "memory_bytes": 1}},
    "a byte of memory": {"spec": spec(), "cluster": {"num_nodes": 1, "devices_per_node": 1, "memory_bytes": 1}},
    "no such device": {"spec": spec(), "cluster": {**H100, "device": "abacus"}},
}
QUERIES = (
    "/v1/jobs?limit=0", "/v1/jobs?limit=201", "/v1/jobs?limit=x", "/v1/jobs?cursor=!", "/v1/jobs?state=gone",
    "/v1/jobs?label==", "/v1/jobs?count=maybe", "/v1/jobs?name=nobody", "/v1/jobs?nonsense=1", "/v1/nothing", "/",
    "/v1/jobs/job-nowhere000", "/v1/jobs/x", "/v1/jobs/job-nowhere000/plan", "/v1/jobs/job-nowhere000/events",
    "/v1/jobs/job-nowhere000/files/spec.json",
)  # fmt: skip
OF_JOB = (
    "", "/plan", "/checkpoints", "/metrics", "/metrics?name=loss", "/metrics?max_points=2",
    "/metrics?limit=2", "/metrics?limit=2&max_points=2", "/metrics?limit=x", "/metrics?cursor=!", "/files",
    "/files?kind=spec", "/files?kind=none", "/files/nothing", "/files/../x", "/nothing",
)  # fmt: skip


class Session:
    """Requests to a control plane, and their answers as items."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane, self._folder = plane, str(plane.folder)

    def send(self, name: str, method: str, path: str, **request: Any) -> Item:
        """One request's answer."""
        return self.item(name, self.plane.http.request(method, path, **request))

    def item(self, name: str, answer: httpx.Response) -> Item:
        """Status, headers and body of an answer."""
        headers = {key: answer.headers[key] for key in HEADERS if key in answer.headers}
        if headers.get("content-type", "").endswith("json") and answer.content:
            body = self._masked_body(answer.json())
        else:
            body = None if len(answer.content) > 100_000 else mask_json(answer.text, self._folder)
        return Item(name, {"status": answer.status_code, "headers": mask_json(headers, self._folder), "body": body})

    def _masked_body(self, body: Any) -> Any:
        if isinstance(body, Mapping) and "placements" in body and "degrees" in body:
            body = masked_plan(body)
        return mask_json(body, self._folder)


def post_text(session: Session, name: str, path: str, body: Any) -> Item:
    """Post JSON, including NaN and infinity."""
    return session.send(name, "POST", path, content=json.dumps(body), headers=JSON)


def of_service(session: Session) -> Items:
    """The service itself and the description of its API."""
    for path in ("/healthz", "/readyz", "/v1/service", "/v1/cluster"):
        yield session.send(f"GET {path}", "GET", path)
    yield Item("GET /v1/schema", without_prose(session.plane.http.get("/v1/schema").json()))
    yield from of_api(session.plane.http.get("/openapi.json").json())
    figures = session.plane.http.get("/metrics").text.splitlines()
    yield Item("GET /metrics", sorted({line.split("{")[0].split(" ")[0] for line in figures if line[:1] != "#"}))


def of_bad_requests(session: Session) -> Items:
    """Requests that the API rejects."""
    for name, body in BAD_SPECS.items():
        yield post_text(session, f"POST /v1/jobs: {name}", "/v1/jobs", body)
    for name, (text, headers) in BODIES.items():
        for path in ("/v1/jobs", "/v1/plans"):
            yield session.send(f"POST {path}: {name}", "POST", path, content=text, headers=headers)
    for path in QUERIES:
        yield session.send(f"GET {path}", "GET", path)
    for method, path in (("PUT", "/v1/jobs"), ("DELETE", "/v1/jobs"), ("POST", "/v1/schema")):
        yield session.send(f"{method} {path}", method, path)
    for action in ("cancel", "pause", "resume", "move?to=front", "move?to=side", "generate"):
        yield session.send(f"POST /v1/jobs/unknown/{action}", "POST", f"/v1/jobs/job-nowhere000/{action}")
    yield session.send("DELETE /v1/jobs/unknown", "DELETE", "/v1/jobs/job-nowhere000")


def of_plans(session: Session) -> Items:
    for name, body in PLANS.items():
        yield post_text(session, f"POST /v1/plans: {name}", "/v1/plans", body)


def of_jobs(session: Session) -> Items:
    """A job that trains, one that waits, and answers about both."""
    http, plane = session.plane.http, session.plane
    headers = {"idempotency-key": "once"}
    for name, body in (("new", spec(name="first", labels={"a": "b", "commits": "1"})), ("other", spec(name="x"))):
        yield session.send(f"POST /v1/jobs: {name}", "POST", "/v1/jobs", json=body, headers=headers)
    first = http.get("/v1/jobs?name=first").json()["items"][0]["id"]
    plane.await_state(first, "succeeded")
    for path in OF_JOB:
        yield session.send(f"GET ended job{path}", "GET", f"/v1/jobs/{first}{path}")
    yield Item("events of an ended job", list(events(plane, first)))
    for action in ("cancel", "pause", "resume", "move?to=front", "generate"):
        yield session.send(f"POST ended job: {action}", "POST", f"/v1/jobs/{first}/{action}", json={"prompt": "x"})
    waiting = spec(name="waiting", resources={"num_workers": 900})
    yield session.send("POST /v1/jobs: waiting", "POST", "/v1/jobs", json=waiting)
    waiting_id = http.get("/v1/jobs?name=waiting").json()["items"][0]["id"]
    for query in ("", "?limit=1", "?count=true", "?state=queued", "?state=queued,succeeded", "?label=a", "?label=a=c"):
        yield session.send(f"GET /v1/jobs{query}", "GET", f"/v1/jobs{query}")
    yield session.send("GET waiting job: plan", "GET", f"/v1/jobs/{waiting_id}/plan")
    for action in ("move?to=front", "move?to=end", "pause", "pause", "resume", "cancel", "cancel", "resume"):
        yield session.send(f"POST waiting job: {action}", "POST", f"/v1/jobs/{waiting_id}/{action}")
    yield session.send("start from no job", "POST", "/v1/jobs", json=spec(start_from={"job": "job-nowhere000"}))
    yield session.send("start from a job", "POST", "/v1/jobs", json=spec(start_from={"job": first}))
    failing = plane.post(name="failing", labels={"fail": "1"}, retry={"max_failures": 0})["id"]
    plane.await_state(failing, "failed")
    yield session.send("GET failed job", "GET", f"/v1/jobs/{failing}")
    answer = http.delete(f"/v1/jobs/{failing}")
    yield Item("DELETE failed job", {"status": answer.status_code, "keys": sorted(answer.json())})
    while http.delete(f"/v1/jobs/{failing}").status_code == 202:
        pass
    for method in ("GET", "DELETE"):
        yield session.send(f"{method} deleted job", method, f"/v1/jobs/{failing}")


def events(plane: ControlPlane, job_id: str) -> Iterator[Any]:
    """All events of an ended job."""
    for event in plane.events(job_id):
        yield mask_json(event.model_dump(mode="json"), str(plane.folder))


def items(quick: bool) -> Items:
    """All answers; items of one name are numbered."""
    with tempfile.TemporaryDirectory() as folder:
        plane = ControlPlane(Path(folder)).start()
        counts: dict[str, int] = {}
        try:
            for part in (of_service, of_bad_requests, of_plans, of_jobs):
                for item in part(Session(plane)):
                    counts[item.name] = number = counts.get(item.name, 0) + 1
                    yield item if number == 1 else Item(f"{item.name} ({number})", item.content)
        finally:
            plane.close()
