"""Modules that pages share, in a real browser: charts, formats, and the events of a job through a cut."""

import math
from collections.abc import Iterator
from typing import Any

import pytest

from service.web import formats
from tests.service.control_plane import ControlPlane
from tests.service.silent_run import Run, metric
from tests.web.browser import await_in, open_page, violations

pytestmark = pytest.mark.slow


@pytest.fixture
def page(browser: Any, plane: ControlPlane) -> Iterator[Any]:
    """A page with a chart as `chart`, and modules as `format` and `live`."""
    with open_page(browser, base_url=plane.url, viewport={"width": 900, "height": 700}) as page:
        page.goto("/nowhere")
        page.evaluate(
            """async () => {
                const base = new URL(".", document.querySelector("script[src*=modules]").src);
                const load = name => import(new URL(name, base).href);
                const { Chart, smooth } = await load("chart.js");
                const link = document.querySelector("link[rel=stylesheet]");
                const style = Object.assign(document.createElement("link"), { rel: "stylesheet" });
                style.href = link.href.replace("style/style.css", "vendor/uplot/uPlot.min.css");
                await new Promise(done => { style.onload = done; link.before(style); });
                const element = document.createElement("section");
                document.querySelector("main").replaceChildren(document.createElement("h1"), element);
                document.querySelector("h1").textContent = "Charts";
                Object.assign(window, { Chart, smooth, format: await load("format.js"), live: await load("live.js") });
                window.chart = new Chart(element, { title: "Loss" });
            }"""
        )
        yield page


def test_a_chart_has_gaps_for_what_is_not_finite_and_says_how_many(page: Any) -> None:
    page.evaluate("chart.show([{ name: 'loss', x: [1, 2, 3, 4, 5], y: [3, NaN, 2, Infinity, 1] }])")
    assert page.locator(".chart-note").first.inner_text().startswith("2 values are not finite")
    assert page.locator(".u-wrap canvas").count() == 1
    assert violations(page) == []
    page.evaluate("chart.set({ isLog: true })")
    page.evaluate("chart.show([{ name: 'loss', x: [1, 2, 3], y: [3, 0, -2] }])")
    assert "not positive" in page.locator(".chart-note").first.inner_text()
    page.evaluate("chart.show([{ name: 'loss', x: [1, 2], y: [NaN, NaN] }])")
    assert page.locator(".u-wrap").count() == 0
    assert page.locator(".chart-note").first.inner_text().startswith("All values")
    page.evaluate("chart.show([])")
    assert page.locator(".chart-note").first.inner_text() == "No values yet."


def test_a_chart_grows_replaces_repeated_steps_and_is_a_table_too(page: Any) -> None:
    page.evaluate("chart.show([{ name: 'a', x: [1, 2, 3], y: [3, 2, 1] }, { name: 'b', x: [2, 4], y: [7, 8] }])")
    page.evaluate("chart.add('a', [[2, 20], [3, 30], [4, 40]])")
    page.locator("summary").click()
    rows = page.locator(".chart details tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert rows == [["1", "3", ""], ["2", "20", "7"], ["3", "30", ""], ["4", "40", "8"]]
    assert violations(page) == []
    many = "Array.from({ length: 100_000 }, (_, i) => i)"
    page.evaluate(f"chart.show([{{ name: 'a', x: {many}, y: {many}.map(i => Math.sin(i / 9000)) }}])")
    assert page.locator(".chart details tbody tr").count() <= 51


def test_a_zoom_is_announced_and_undone(page: Any) -> None:
    page.evaluate("""() => {
        window.zooms = [];
        chart.set({ onZoom: zoom => zooms.push(zoom) });
        const x = Array.from({ length: 1000 }, (_, i) => i);
        chart.show([{ name: "loss", x, y: x.map(step => 1 / (step + 1)) }]);
    }""")
    box = page.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 60, steps=5)
    page.mouse.up()
    await_in(page, "zooms.length === 1")
    low, high = page.evaluate("zooms[0]")
    assert 0 < low < high < 999
    page.locator(".u-over").dblclick()
    await_in(page, "zooms.at(-1) === null")
    page.evaluate("chart.zoom([10, 20])")  # by another chart, which need not be told
    assert len(page.evaluate("zooms")) == 2


def test_smoothing_keeps_constants_and_gaps(page: Any) -> None:
    values = page.evaluate("smooth([2, 2, null, 2], 0.9)")
    assert values[2] is None
    assert [values[0], values[1], values[3]] == pytest.approx([2, 2, 2])
    assert page.evaluate("smooth([0, 10], 0.5)") == pytest.approx([0, 20 / 3])


def test_numbers_and_times_are_written_as_the_server_writes_them(page: Any) -> None:
    numbers = [
        0,
        1,
        -3,
        12345,
        0.5,
        3.14159,
        123.456,
        1234.56,
        98765.4,
        0.00012345,
        2.5e-7,
        -4e-5,
        12345678.9,
        1e9,
        0.001,
    ]
    assert page.evaluate("values => values.map(format.number)", numbers) == [formats.number(value) for value in numbers]
    odd = page.evaluate("[NaN, Infinity, -Infinity, null].map(format.number)")
    assert odd == [formats.number(value) for value in (math.nan, math.inf, -math.inf, None)]
    seconds = [0, 0.4, 1, 59, 60, 61, 3600, 3661, 86_400, 90_061, 1e6]
    assert page.evaluate("values => values.map(format.duration)", seconds) == [
        formats.duration(value) for value in seconds
    ]
    sizes = [0, 1, 1023, 1024, 1536, 10**6, 10**9, 10**12, 10**15]
    assert page.evaluate("values => values.map(format.size)", sizes) == [formats.size(value) for value in sizes]
    parts = [(0, 0), (0, 10), (1, 3), (999, 1000), (10, 10)]
    assert page.evaluate("pairs => pairs.map(pair => format.percent(...pair))", parts) == [
        formats.percent(*pair) for pair in parts
    ]


def test_events_go_on_after_the_control_plane_was_killed(browser: Any, own_plane: ControlPlane) -> None:
    run = Run(own_plane.start())
    with open_page(browser, base_url=own_plane.url) as page:
        page.goto("/nowhere")
        page.evaluate(
            """async id => {
                const base = new URL(".", document.querySelector("script[src*=modules]").src);
                const { JobEvents } = await import(new URL("live.js", base).href);
                window.seen = []; window.connections = [];
                window.events = new JobEvents(id);
                events.addEventListener("event", ({ detail }) => seen.push([detail.id, detail.kind]));
                events.addEventListener("connection", ({ detail }) => connections.push(detail));
                events.open();
            }""",
            run.id,
        )
        run.send(0, metric(1), metric(2))
        await_in(page, "seen.filter(([, kind]) => kind === 'metric').length === 2")
        own_plane.kill()
        await_in(page, "connections.at(-1) === 'lost'")
        own_plane.start()
        run.send(2, metric(3), metric(4))
        await_in(page, "seen.filter(([, kind]) => kind === 'metric').length === 4")
        assert page.evaluate("connections") == ["on", "lost", "on"]
        run.end()
        await_in(page, "connections.at(-1) === 'ended'")
        ids = [number for number, _ in page.evaluate("seen")]
        assert ids == list(range(1, run.plane.job(run.id)["last_event_id"] + 1))  # each once, none missing
