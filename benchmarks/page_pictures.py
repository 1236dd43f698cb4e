"""Pictures of the pages: wide and narrow, light and dark, in a real Chromium; writes `docs/pictures/page-*.png`.

The control plane is a real one, and its jobs train: small ones, on this machine, without Ray.
`python -m benchmarks.page_pictures jobs` takes only the pictures of that page.
"""

import io
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from tests.processes import await_that
from tests.service.control_plane import TOKEN, ControlPlane
from tests.unit.train_runs import corpus
from tests.unit.train_runs import job as small_job
from tests.web.browser import open_browser, open_page

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
SIZES = {"wide": {"width": 1280, "height": 860}, "narrow": {"width": 390, "height": 844}}
SCHEMES = ("light", "dark")
EIGHT_EXPERTS = {"num_experts": 8, "hidden_dim": 24, "group_tokens": 64}


@contextmanager
def training_plane(**settings: Any) -> Iterator[ControlPlane]:
    """A control plane with small translation jobs: some have ended in each way, one trains, one waits."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plane = ControlPlane(folder, data_roots=[name], **settings).start()
        try:
            submit_jobs(plane, corpus(folder))
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
    running = submit("four-languages", "research", num_steps=3000)
    submit("on-more-machines", "platform", resources={"num_workers": 64})
    await_that(partial(has_begun, plane, running))


def has_begun(plane: ControlPlane, job_id: str) -> bool:
    return bool(plane.job(job_id)["step"] > 30)


def show_jobs(page: Any, plane: ControlPlane) -> None:
    page.goto(f"{plane.url}/")


def show_login(page: Any, plane: ControlPlane) -> None:
    page.goto(f"{plane.url}/login")


PAGES: dict[str, tuple[Callable[[Any, ControlPlane], None], dict[str, Any]]] = {
    "jobs": (show_jobs, {}),
    "login": (show_login, {"token": TOKEN}),
}
"""How to show each page, and the settings of its control plane."""


def main() -> None:
    with open_browser() as browser:
        for name in sys.argv[1:] or PAGES:
            show, settings = PAGES[name]
            with training_plane(**settings) as plane:
                for size, viewport in SIZES.items():
                    for scheme in SCHEMES:
                        with open_page(browser, viewport=viewport, color_scheme=scheme) as page:
                            show(page, plane)
                            page.wait_for_load_state("networkidle")
                            keep(page.screenshot(), f"page-{name}-{size}-{scheme}")


def keep(screenshot: bytes, name: str) -> None:
    """Write a PNG with few colours, which pages have anyway."""
    path = FOLDER / f"{name}.png"
    picture = Image.open(io.BytesIO(screenshot)).convert("RGB")
    picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"docs/pictures/{path.name}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
