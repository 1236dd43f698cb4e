"""The cluster's page and the planner's, over HTTP."""

import json
from pathlib import Path

import httpx
import pytest

from moe.plan import Plan
from service.web.layout_bars import BAR_UNITS, layout_bars
from service.web.static_files import FOLDER
from tests.processes import await_that
from tests.service.control_plane import ControlPlane, spec
from tests.web.test_pages import HOSTILE, HTML, Markup

H100S = {"num_nodes": 2, "devices_per_node": 8, "device": "h100"}


def cells(page: str) -> list[str]:
    return [text.strip() for text in page.replace(">", "\n").replace("<", "\n").split("\n") if text.strip()]


def test_the_cluster_has_its_nodes_holders_and_queue_with_reasons(own_plane: ControlPlane) -> None:
    own_plane.start()
    hold = own_plane.hold()
    running = own_plane.post(labels={"hold": hold.name}, name="holder")["id"]
    own_plane.await_state(running, "running")
    waiting = own_plane.post(resources={"num_workers": 900}, name="waiter")["id"]
    page = own_plane.http.get("/cluster", headers=HTML).text
    texts = cells(page)
    assert {"127.0.0.1", "holder", "waiter", own_plane.job(waiting)["reason"]} <= set(texts)
    assert {f"/jobs/{running}", f"/jobs/{waiting}"} <= set(Markup(page).attributes("a", "href"))
    hold.unlink()


def test_without_the_cluster_the_queue_is_shown_and_its_place_says_why(own_plane: ControlPlane) -> None:
    own_plane.start()
    waiting = own_plane.post(resources={"num_workers": 900}, name="waiter")["id"]
    own_plane.launcher.set_reachable(False)
    await_that(lambda: own_plane.http.get("/v1/cluster").status_code == 503)
    response = own_plane.http.get("/cluster", headers=HTML)
    assert response.status_code == 200
    markup = Markup(response.text)
    assert "warning" in markup.attributes("p", "data-kind")
    assert f"/jobs/{waiting}" in markup.attributes("a", "href")


def test_a_plan_of_other_machines_has_a_bar_for_each_layout(plane: ControlPlane) -> None:
    request = {"spec": spec(name="planned"), "cluster": H100S, "top": 3, "num_workers": 8}
    response = plane.http.post("/fragments/plan", json=request)
    assert response.status_code == 200, response.text
    plan = Plan.model_validate(plane.http.post("/v1/plans", json=request).json())
    markup = Markup(response.text)
    assert markup.inline == []
    assert markup.attributes("svg", "class").count("plan-bar") == 2 * (1 + len(plan.runners_up))
    for layout in layout_bars(plan).layouts:
        for bar in (layout.time, layout.memory):
            assert 0 < bar.end <= BAR_UNITS * 1.001
            assert all(
                abs(before.start + before.width - after.start) < 0.1
                for before, after in zip(bar.segments, bar.segments[1:], strict=False)
            )


@pytest.mark.parametrize(
    ("body", "media_type", "status", "path"),
    [
        (
            json.dumps({"spec": spec(), "cluster": H100S | {"device": "h1000"}}).encode(),
            "application/json",
            422,
            "device",
        ),
        (json.dumps(spec(name=HOSTILE)).encode(), "application/json", 422, "name"),
        (b"a: [", "application/yaml", 400, None),
        (b"a=b", "application/x-www-form-urlencoded", 415, None),
    ],
)
def test_a_refused_plan_has_the_problems_of_the_api(
    plane: ControlPlane, body: bytes, media_type: str, status: int, path: str | None
) -> None:
    response = plane.http.post("/fragments/plan", content=body, headers={"content-type": media_type, **HTML})
    assert (response.status_code, response.headers["content-type"]) == (status, "application/problem+json")
    paths = [problem["path"] for problem in response.json()["errors"]]
    assert path is None or any(path in place for place in paths), paths


def test_examples_of_pages_are_those_of_the_repository(plane: ControlPlane) -> None:
    examples = Path(__file__).parents[2] / "examples"
    page = plane.http.get("/plan", headers=HTML).text
    urls = [url for url in Markup(page).attributes("option", "value") if url.startswith("/static/")]
    assert len(urls) == len(list((FOLDER / "examples").iterdir())) > 5
    for url in urls:
        assert plane.http.get(url).text == (examples / url.rpartition("/")[2]).read_text()


def test_a_body_that_is_too_large_is_not_read(plane: ControlPlane) -> None:
    memory_bytes = plane.memory_bytes()
    headers = {"content-type": "application/yaml"}
    chunks = (b"x" * (1 << 20) for _ in range(128))
    for content in (b"x" * (128 << 20), chunks):
        try:
            response = plane.http.post("/fragments/plan", content=content, headers=headers)
        except httpx.TransportError:  # it closes the connection while the rest is being sent
            continue
        assert response.status_code == 413
    assert plane.memory_bytes() - memory_bytes < 64 << 20
