"""Pages of sweeps and of compared jobs."""

from itertools import pairwise
from typing import Any

import pytest

from service.web.parallel_axes import parallel_axes
from service.web.scatter_plot import MIN_TICK_GAP_X, MIN_TICK_GAP_Y, NUM_LABELLED, ScatterPlot, scatter_plot
from tests.processes import await_that
from tests.service.control_plane import ControlPlane, spec
from tests.service.databases import BOTH_DATABASES
from tests.web.browser import open_page, violations
from tests.web.test_pages import HOSTILE, check_page, page_of

SWEEP = {"method": "successive_halving", "fields": {"train.seed": {"values": [3, 1, 2]}}, "min_steps": 2}


@pytest.fixture(scope="module")
def sweep(plane: ControlPlane) -> dict[str, Any]:
    """A sweep that has ended, of three jobs."""
    body = spec(name="seeds", train={"num_steps": 6, "batch_tokens": 1024}, sweep=SWEEP)
    path = f"/v1/sweeps/{plane.http.post('/v1/sweeps', json=body).json()['id']}"
    await_that(lambda: plane.http.get(path).json()["state"] == "succeeded")
    return dict(plane.http.get(path).json())


@BOTH_DATABASES
def test_pages_are_strict_and_have_the_results(plane: ControlPlane, sweep: dict[str, Any]) -> None:
    listing, page = page_of(plane, "/sweeps"), page_of(plane, f"/sweeps/{sweep['id']}")
    for response in (listing, page):
        check_page(plane, response, 200)
        assert sweep["id"] in response.text
    rows = [page.text.index(f'href="/jobs/{member["job"]}"') for member in sweep["members"]]
    assert rows == sorted(rows)  # the best first
    jobs = "&".join(f"job={member['job']}" for member in sweep["members"])
    for path in (f"/compare?{jobs}", f"/compare?sweep={sweep['id']}"):
        comparison = page_of(plane, path)
        check_page(plane, comparison, 200)
        assert comparison.text.count('data-differs="yes"') == 2  # the seeds of the other two
    check_page(plane, page_of(plane, "/compare"), 200)
    check_page(plane, page_of(plane, f"/compare?job=job-aaaaaaaaaaaa&job={HOSTILE}"), 200)
    check_page(plane, page_of(plane, "/sweeps/sweep-aaaaaaaaaaaa"), 404)
    check_page(plane, page_of(plane, "/sweeps?cursor=nonsense"), 422)


def test_hostile_values_are_text(plane: ControlPlane) -> None:
    fields = {"data.corpus": {"values": ["catalogs"]}, "train.evaluation.prompts": {"values": [[HOSTILE], []]}}
    body = spec(
        name="hostile", model={"preset": "mixtral-8x7b"}, data={"corpus": "synthetic"}, sweep={"method": "grid",
        "fields": fields})  # fmt: skip
    refusal = plane.http.post("/v1/sweeps", json=body)
    assert refusal.status_code == 422
    members = [{"number": 1, "job": "job-a", "name": HOSTILE, "value": 1.0, "values": {"a.b": HOSTILE}}]
    picture = parallel_axes({"members": members, "fields": ["a.b"], "metric": "loss"})
    assert picture is not None
    assert picture.axes[0].ticks[0][1].startswith("<script>")  # escaped by the template


def test_a_line_for_each_member_between_the_ends_of_its_axes() -> None:
    rates = [1e-4, 1e-3, 1e-2]
    members = [
        {"number": place, "job": "job-a", "name": "a", "value": value, "values": {"lr": rate, "decay": decay}}
        for place, (value, rate, decay) in enumerate(zip([1.0, 2.0, None], rates, ["cosine", "linear", "cosine"],
                                                         strict=True))
    ]  # fmt: skip
    picture = parallel_axes({"members": members, "fields": ["lr", "decay"], "metric": "loss"})
    assert picture is not None
    assert [line.rank for line in picture.lines] == ["none", "good", "best"]
    heights = {line.rank: [float(point.split(",")[1]) for point in line.points.split()] for line in picture.lines}
    low, middle, high = heights["best"][0], heights["good"][0], heights["none"][0]
    assert low - middle == pytest.approx(middle - high)  # a logarithmic axis
    assert (heights["best"][1], heights["none"][1], len(heights["none"])) == (low, low, 2)
    assert parallel_axes({"members": [members[2]], "fields": ["lr"], "metric": "loss"}) is None


def plot_of(values: list[float | None], first: list[Any], second: list[Any]) -> ScatterPlot:
    members = [
        {"number": place, "job": f"job-{place}", "name": "a", "value": value, "values": {"x.lr": x, "y.kind": y}}
        for place, (value, x, y) in enumerate(zip(values, first, second, strict=True))
    ]
    plot = scatter_plot({"members": members, "fields": ["x.lr", "y.kind"], "metric": "loss"})
    assert plot is not None
    return plot


def test_points_lie_at_their_values_the_best_first() -> None:
    plot = plot_of([1.0, 2.0, None], [1e-4, 1e-3, 1e-2], ["cosine", "linear", "cosine"])
    best, other, without = plot.points
    assert other.x - best.x == pytest.approx(without.x - other.x, abs=0.2)  # a logarithmic axis
    assert (plot.x.is_log, plot.y.is_log, plot.x.name) == (True, False, "lr")
    assert best.y == without.y != other.y
    assert [point.shade for point in plot.points] == ["1", "3", "none"]
    assert [(point.label, point.is_best) for point in plot.points] == [("1", True), ("2", False), ("", False)]
    assert [text for _, text in plot.y.ticks] == ["cosine", "linear"]


@pytest.mark.parametrize(
    ("values", "is_log"),
    [([3e-4, 3.1e-4], False), ([0, 100], False), ([-1, 5], False), ([1e-9, 1e9], True), ([7, 7], False),
     ([True, False], False), ([None, [1, 2]], False)],
)  # fmt: skip
def test_all_points_and_ticks_are_inside_the_frame(values: list[Any], is_log: bool) -> None:
    plot = plot_of([1.0, 2.0], values, values[::-1])
    assert plot.x.is_log == is_log
    assert all(plot.left < point.x < plot.right and plot.top < point.y < plot.bottom for point in plot.points)
    for axis, gap in ((plot.x, MIN_TICK_GAP_X), (plot.y, MIN_TICK_GAP_Y)):
        places = [place for place, _ in axis.ticks]
        assert all(abs(after - before) >= gap for before, after in pairwise(places))


def test_of_many_members_the_best_are_labelled_and_ticks_have_room() -> None:
    numbers = list(range(1, 201))
    plot = plot_of([float(number) for number in numbers], numbers, numbers)
    assert sum(bool(point.label) for point in plot.points) == NUM_LABELLED
    assert len(plot.x.ticks) >= 2


def test_other_numbers_of_fields_have_no_plot() -> None:
    member = {"number": 1, "job": "a", "name": "a", "value": 1.0, "values": {"x": 1}}
    assert scatter_plot({"members": [member], "fields": ["x"], "metric": "loss"}) is None
    assert scatter_plot({"members": [], "fields": ["x", "y"], "metric": "loss"}) is None


def test_points_of_a_sweep_are_reached_by_keyboard(plane: ControlPlane, browser: Any) -> None:
    fields = {"train.seed": {"values": [1, 2]}, "train.batch_tokens": {"values": [512, 1024]}}
    body = spec(name="two", train={"num_steps": 2, "batch_tokens": 1024}, sweep={"method": "grid", "fields": fields})
    path = f"/v1/sweeps/{plane.http.post('/v1/sweeps', json=body).json()['id']}"
    await_that(lambda: plane.http.get(path).json()["state"] == "succeeded")
    best = plane.http.get(path).json()["members"][0]
    with open_page(browser) as page:
        page.goto(f"{plane.url}{path.removeprefix('/v1')}")
        assert page.locator(".scatter a").count() == 4
        page.locator(".scatter a").first.focus()
        assert page.evaluate("document.querySelector('tr[data-chosen]').dataset.member") == str(best["number"])
        assert violations(page) == []
        page.keyboard.press("Enter")
        page.wait_for_url(f"**/jobs/{best['job']}")


def test_two_jobs_are_chosen_and_compared(plane: ControlPlane, sweep: dict[str, Any], browser: Any) -> None:
    """From the list of jobs to curves over one another, and another metric."""
    best, other = sweep["members"][0], sweep["members"][1]
    with open_page(browser) as page:
        page.goto(f"{plane.url}/?label=sweep={sweep['id']}")
        for member in (best, other):
            page.get_by_role("checkbox", name=f"select {member['name']}").check()
        page.get_by_role("link", name="Compare").click()
        picture = page.get_by_role("img", name="loss")
        picture.wait_for()
        words = picture.get_attribute("aria-label")
        assert f"{best['name']}: 6 values" in words
        assert f"{other['name']}: 2 values" in words
        page.get_by_label("Metric").select_option("tokens_per_s")
        page.get_by_role("img", name="tokens_per_s").wait_for()
        page.get_by_label("Smoothing").fill("0.5")
        assert page.locator("#differences [data-differs]").count() == 1
        assert violations(page) == []
