"""Pictures of the pages: wide and narrow, light and dark, in a real Chromium; writes `docs/pictures/page-*.png`.

The control plane is a real one, and its jobs train: small ones, on this machine, without Ray.
`python -m benchmarks.page_pictures jobs sweep` takes only the pictures of those pages.
"""

import io
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from tests.processes import DEADLINE_S, await_that
from tests.service.control_plane import TOKEN, ControlPlane
from tests.unit.train_runs import corpus
from tests.unit.train_runs import job as small_job
from tests.web.browser import await_in, open_browser, open_page

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
SIZES = {"wide": {"width": 1440, "height": 900}, "narrow": {"width": 390, "height": 844}}
LOOKS = (("wide", "light"), ("wide", "dark"), ("narrow", "light"))
DEADLINE_MS = 1000 * DEADLINE_S
EIGHT_EXPERTS = {"num_experts": 8, "hidden_dim": 24, "group_tokens": 64}


@contextmanager
def training_plane() -> Iterator[ControlPlane]:
    """A control plane with small translation jobs: some have ended in each way, one trains, one waits."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plane = ControlPlane(folder, data_roots=[name]).start()
        try:
            submit_jobs(plane, corpus(folder))
            yield plane
        finally:
            plane.close()


@contextmanager
def empty_plane(token: str | None = None) -> Iterator[ControlPlane]:
    """A control plane without jobs."""
    with tempfile.TemporaryDirectory() as name:
        plane = ControlPlane(Path(name), token=token).start()
        try:
            yield plane
        finally:
            plane.close()


def submit_jobs(plane: ControlPlane, data: dict[str, Any]) -> None:
    """Small jobs on text in four languages, each with its own peak learning rate or router."""

    def submit(name: str, team: str, num_steps: int = 120, **parts: Any) -> str:
        train = {"num_steps": num_steps, **parts.pop("train", {})}
        labels = {"team": team, "trains": "yes", **parts.pop("labels", {})}
        job = small_job(data, name=name, labels=labels, train=train, **parts)
        return str(plane.submit(job.model_dump(mode="json", exclude_unset=True))["id"])

    ended = [submit(f"lr-{peak_lr:g}", "search", train={"optimizer": {"name": "adamw", "peak_lr": peak_lr}})
             for peak_lr in (3e-3, 1e-2, 3e-2)]  # fmt: skip
    ended.append(submit("eight-experts", "research", model={"moe": EIGHT_EXPERTS}))
    ended.append(submit("lost-its-driver", "research", labels={"die_at": "70"}, retry={"max_failures": 0}))
    for job_id in ended:
        plane.await_state(job_id, "succeeded", "failed")
    for action, state in (("pause", "paused"), ("cancel", "cancelled")):
        job_id = submit(f"to-{action}", "platform", num_steps=100_000)
        await_that(partial(has_begun, plane, job_id))
        plane.act(job_id, action)
        plane.await_state(job_id, state)
    sweep_rates_and_decays(plane, data)
    running = submit("four-languages", "research", num_steps=3000, train={"evaluation": {"every_steps": 100}})
    submit("on-more-machines", "platform", resources={"num_workers": 64})
    await_that(partial(has_begun, plane, running, 200))


def sweep_rates_and_decays(plane: ControlPlane, data: dict[str, Any]) -> None:
    """A sweep of eight jobs, to its end."""
    fields = {
        "train.optimizer.peak_lr": {"values": [3e-3, 1e-2, 3e-2, 1e-1]},
        "train.schedule.decay": {"values": ["inverse_sqrt", "cosine"]},
    }
    body = small_job(data, name="rates", labels={"team": "search", "trains": "yes"}, train={"num_steps": 60})
    answer = plane.http.post(
        "/v1/sweeps",
        json=body.model_dump(mode="json", exclude_unset=True) | {"sweep": {"method": "grid", "fields": fields}},
    )
    assert answer.status_code == 201, answer.text
    await_that(lambda: plane.http.get(f"/v1/sweeps/{answer.json()['id']}").json()["state"] == "succeeded")


def has_begun(plane: ControlPlane, job_id: str, num_steps: int = 30) -> bool:
    return bool(plane.job(job_id)["step"] > num_steps)


def show_jobs(page: Any, plane: ControlPlane) -> None:
    page.goto(f"{plane.url}/")
    page.wait_for_load_state("networkidle")


def show_job(page: Any, plane: ControlPlane) -> None:
    page.goto(f"{plane.url}/jobs/{plane.list_jobs(state='running')[0]['id']}")
    page.wait_for_selector('[data-chart="Loss"] .u-over')


def show_experts(page: Any, plane: ControlPlane) -> None:
    show_job(page, plane)
    page.locator("#experts").scroll_into_view_if_needed()
    page.wait_for_selector("#heat-map > canvas")


def show_labels(page: Any, plane: ControlPlane) -> None:
    show_job(page, plane)
    page.locator("#experts").scroll_into_view_if_needed()
    page.wait_for_selector("#label-map canvas")


def show_whole_job(page: Any, plane: ControlPlane) -> None:
    """A job's page after its parts that load once they are in view."""
    show_experts(page, plane)
    page.locator("#logs").scroll_into_view_if_needed()


def show_ended_job(page: Any, plane: ControlPlane) -> None:
    """Scores and completions of a job, which it reports after its last step."""
    page.goto(f"{plane.url}/jobs/{plane.list_jobs(search='eight-experts')[0]['id']}")
    page.wait_for_selector('[data-chart="Loss"] .u-over')


def show_comparison(page: Any, plane: ControlPlane) -> None:
    jobs = plane.list_jobs(search="lr-", state="succeeded")
    page.goto(f"{plane.url}/compare?" + "&".join(f"job={job['id']}" for job in jobs))
    page.wait_for_selector("#curves .u-over")


def show_sweeps(page: Any, plane: ControlPlane) -> None:
    page.goto(f"{plane.url}/sweeps")


def show_sweep(page: Any, plane: ControlPlane) -> None:
    sweep = plane.http.get("/v1/sweeps").json()["items"][0]
    page.goto(f"{plane.url}/sweeps/{sweep['id']}")
    page.wait_for_load_state("networkidle")


def show_webhooks(page: Any, plane: ControlPlane) -> None:
    """Two webhooks that no event has been sent to."""
    webhooks: list[dict[str, Any]] = [
        {
            "name": "team-channel",
            "url": "https://hooks.slack.com/services/T00000000/B00000000/example",
            "format": "slack",
        },
        {"name": "registry", "url": "https://registry.example.com/trained", "states": ["succeeded"], "enabled": False},
    ]
    for webhook in webhooks:
        plane.http.post("/v1/webhooks", json=webhook)
    page.goto(f"{plane.url}/webhooks")
    page.locator("#content").wait_for()


def show_form(page: Any, plane: ControlPlane) -> None:
    page.goto(f"{plane.url}/submit")
    page.select_option("#example", label="translate-100-to-english")
    page.locator("#plan:not([data-busy]) .plan-layout.chosen").wait_for()


def show_cluster(page: Any, plane: ControlPlane) -> None:
    page.goto(f"{plane.url}/cluster")
    page.wait_for_load_state("networkidle")


def show_plan(page: Any, plane: ControlPlane) -> None:
    page.goto(f"{plane.url}/plan")
    page.select_option("#example", label="gshard-600b")
    await_in(page, "document.getElementById('spec').value !== ''")
    page.select_option("#device", "h100")
    page.fill("#num-nodes", "256")
    page.click("button[type=submit]")
    page.locator(".plan-layout.chosen").wait_for()


def show_refusal(page: Any, plane: ControlPlane) -> None:
    page.goto(f"{plane.url}/jobs/job-aaaaaaaaaaaa")


def show_login(page: Any, plane: ControlPlane) -> None:
    page.goto(f"{plane.url}/login")


@dataclass(frozen=True)
class PagePicture:
    """How to show a page, the id of the part at the window's top, and whether the picture goes on below the window."""

    show: Callable[[Any, ControlPlane], None]
    part: str = "main"
    full_page: bool = False
    plane: Callable[[], AbstractContextManager[ControlPlane]] = training_plane


PAGES = {
    "jobs": PagePicture(show_jobs),
    "job": PagePicture(show_job),
    "job-experts": PagePicture(show_experts, part="experts"),
    "job-labels": PagePicture(show_labels, part="labels"),
    "job-results": PagePicture(show_ended_job, part="results"),
    "job-whole": PagePicture(show_whole_job, full_page=True),
    "compare": PagePicture(show_comparison, full_page=True),
    "sweeps": PagePicture(show_sweeps),
    "sweep": PagePicture(show_sweep, full_page=True),
    "submit": PagePicture(show_form),
    "webhooks": PagePicture(show_webhooks, full_page=True, plane=empty_plane),
    "cluster": PagePicture(show_cluster, full_page=True),
    "plan": PagePicture(show_plan, full_page=True),
    "refusal": PagePicture(show_refusal),
    "login": PagePicture(show_login, plane=partial(empty_plane, TOKEN)),
}


def main() -> None:
    with ExitStack() as stack:
        browser = stack.enter_context(open_browser())
        planes: dict[Any, ControlPlane] = {}
        for name in sys.argv[1:] or PAGES:
            picture = PAGES[name]
            if picture.plane not in planes:
                planes[picture.plane] = stack.enter_context(picture.plane())
            take(browser, name, picture, planes[picture.plane])


def take(browser: Any, name: str, picture: PagePicture, plane: ControlPlane) -> None:
    """Show a page once, and keep a picture of each look."""
    with open_page(browser, viewport=SIZES["wide"]) as page:
        page.set_default_timeout(DEADLINE_MS)
        picture.show(page, plane)
        for size, scheme in LOOKS:
            page.set_viewport_size(SIZES[size])
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            page.evaluate("scrollTo(0, 0)")
            if picture.part != "main":
                page.evaluate(f"document.getElementById('{picture.part}').scrollIntoView()")
            page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            keep(page.screenshot(full_page=picture.full_page), f"page-{name}-{size}-{scheme}")


def keep(screenshot: bytes, name: str) -> None:
    """Write a PNG with few colours, which pages have anyway."""
    path = FOLDER / f"{name}.png"
    picture = Image.open(io.BytesIO(screenshot)).convert("RGB")
    picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"docs/pictures/{path.name}: {path.stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
