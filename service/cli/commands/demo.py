"""`demo`: an example job from end to end on this machine, with everything stopped at the end."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.options import StateDir

if TYPE_CHECKING:
    from rich.console import Console

    from service.client import Job

EXAMPLE = "examples/translate-100-to-english.yaml"
LOG_LINES = 20
"""Last log lines shown of a failed job."""


def demo(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help=f"The job to run. [{EXAMPLE}]")] = None,
    state_dir: StateDir = None,
    num_cpus: Annotated[int | None, typer.Option(metavar="N", min=1, help="CPUs that Ray offers.")] = None,
) -> None:
    """Train a translation model here, from POST to translations.

    The demo uses its own Ray head, control plane and ports, separate from those of 'shardyard up', and stops them at
    the end. The model stays in the demo's state folder, by default 'demo' under the usual one.
    """
    import shlex
    import uuid

    from moe.spec import read_job
    from service.cli.footprint import Footprint
    from service.cli.local import DEMO_FOLDER, settings_for
    from service.cli.view.output import console
    from service.cli.view.result import footprint_line
    from service.signals import Interruption, interruptions

    path = file or _example()
    read_job(path)  # reports mistakes before Ray is started
    folder = settings_for(state_dir=state_dir).state_dir / (DEMO_FOLDER if state_dir is None else "")
    # The usual places are looked through without being told.
    options = f" --state-dir {shlex.quote(str(folder))}" if state_dir else ""
    out = console()
    try:
        with _exclusive_use(folder), interruptions(), Footprint(mark=uuid.uuid4().hex) as footprint:
            job = _run(path, folder, num_cpus, footprint.mark, options, out)
        out.print(footprint_line(footprint))
    except Interruption as interruption:
        typer.echo("\nstopped early; nothing is left running", err=True)
        raise typer.Exit(interruption.exit_code) from None
    raise typer.Exit(0 if job.state == "succeeded" else 1)


def _run(path: Path, folder: Path, num_cpus: int | None, mark: str, options: str, out: "Console") -> "Job":
    """Run the job, print its report, stop everything, and return the ended job. `options`: of the command that uses
    its model."""
    from contextlib import closing

    from moe.records import StoredCheckpoint
    from service.cli.child import ControlPlaneChild
    from service.cli.options import program
    from service.cli.view.details import outcome
    from service.cli.view.follow import follower
    from service.cli.view.jobs import log_line
    from service.cli.view.kinds import report_view, words_of
    from service.cli.view.progress import RunProgress
    from service.cli.view.result import training_summary
    from service.client import Client

    out.print("starting Ray and the control plane (about 20 s) ...")
    with ControlPlaneChild(folder, num_cpus, mark) as plane:
        plane.await_ready()
        out.print(f"API at {plane.url}, its docs at {plane.url}/docs; submitting {path}")
        with Client(plane.url, token="") as client:
            job = client.submit(path)
            words = words_of(job)
            display = follower(RunProgress(job.id, job.name, job.num_steps, words.last_work), out)
            with closing(job.events(on_lost=display.on_disconnect)) as events:
                display.show(events)
            job.refresh()
            if job.state != "succeeded":
                for line in list(job.logs())[-LOG_LINES:]:
                    out.print(log_line(line), soft_wrap=True)
                out.print(outcome(job, hints=False))
            elif (report := report_view(job)) is not None:
                workers = job.plan().num_workers
                checkpoints = [StoredCheckpoint.read(fields) for fields in job.checkpoints()]
                use = None if words.command is None else f"{program()} {words.command}{options}"
                out.print(training_summary(job, report, checkpoints, display.progress, workers, use))
        out.print("stopping Ray and the control plane ...")
    return job


@contextmanager
def _exclusive_use(folder: Path) -> Iterator[None]:
    """Context that locks `folder` and empties its list of jobs. Raises Misuse while another demo uses it. Earlier
    demos' checkpoints and the prepared corpus stay."""
    import fcntl

    from service.cli.failures import Misuse
    from service.head.local_head import LocalHead

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / "demo.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Misuse(f"another demo is running in {folder}; wait for it, or use --state-dir") from None
        LocalHead.stop_recorded(folder)  # of a demo that was killed
        for left in folder.glob("shardyard.db*"):
            left.unlink()  # its jobs would continue, and use the cores
        yield


def _example() -> Path:
    """The repository's example. Raises Misuse if there is none."""
    import service
    from service.cli.failures import Misuse

    beside_the_packages = Path(str(service.__file__)).parent.parent / EXAMPLE
    for path in (Path(EXAMPLE), beside_the_packages):
        if path.exists():
            return path
    raise Misuse(f"there is no {EXAMPLE} here; name a job file: shardyard demo FILE")
