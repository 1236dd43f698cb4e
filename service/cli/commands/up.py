"""`up` and `down`: a control plane on this machine, with its own Ray head."""

import socket
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from service.cli.options import StateDir

if TYPE_CHECKING:
    import threading

    from service.head.keeper import HeadKeeper
    from service.head.local_head import LocalHead
    from service.settings import Settings

MIN_LOGICAL_CPUS = 2
"""Least logical CPUs of a head: one core runs a job of two workers, slowly."""
USED_ELSEWHERE = "another 'shardyard up' uses Ray: it is left running"


def up(
    host: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Address to listen on. [127.0.0.1]")] = None,
    port: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=65535, help="Port; 0 for any free one. [8321]")
    ] = None,
    state_dir: StateDir = None,
    data_root: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A folder that jobs may read corpora from; repeat for several."),
    ] = None,
    num_cpus: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="CPUs that the Ray head offers. [this machine's]")
    ] = None,
    ray_dashboard_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Use this Ray cluster instead of starting one.")
    ] = None,
    ray_token_path: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with that cluster's token, if it has one.")
    ] = None,
    keep_ray: Annotated[
        bool | None,
        typer.Option("--keep-ray/--stop-ray", help="At exit, leave or stop Ray. [leave it only while jobs run]"),
    ] = None,
) -> None:
    """Start Ray and the control plane here.

    Runs until Ctrl-C. Training does not depend on the control plane: while jobs run, Ctrl-C stops only the control
    plane, and the next 'shardyard up' finds them again. 'shardyard down' stops Ray, too.
    """
    from service.cli.cluster_check import require_kubernetes
    from service.cli.early_corpus import EarlyCorpus
    from service.cli.failures import CommandError
    from service.cli.local import require_usable, settings_for
    from service.head.keeper import HeadKeeper
    from service.head.local_head import LocalHead
    from service.head.record import mark_used, record_file
    from service.signals import Interruption, ignore_signals, interruptions

    roots = tuple(map(_absolute, data_root)) if data_root else None
    settings = settings_for(
        host=host, port=port, state_dir=state_dir, data_roots=roots,
        ray_dashboard_url=ray_dashboard_url, ray_token_path=ray_token_path,
    )  # fmt: skip
    own_head = "ray_dashboard_url" not in settings.model_fields_set and settings.launcher == "ray_jobs"
    if own_head:
        _require_folders(roots or ())
    head: LocalHead | None = None
    keeper: HeadKeeper | None = None
    mark: IO[str] | None = None
    with _bind_socket(settings) as listener, interruptions():
        # Settings again with the port that was bound: the URL for drivers' records depends on it.
        settings = settings_for(
            host=host, port=listener.getsockname()[1], state_dir=state_dir, data_roots=roots,
            ray_dashboard_url=ray_dashboard_url, ray_token_path=ray_token_path,
        )  # fmt: skip
        try:
            require_usable(settings)  # before Ray's slow start
            require_kubernetes(settings)
            with EarlyCorpus(settings.cache_dir) if own_head and settings.prepare_catalogs else nullcontext():
                if own_head:
                    mark = mark_used(record_file(settings.state_dir))
                    head = _head(settings, num_cpus)
                    settings = settings.model_copy(
                        update={"ray_dashboard_url": head.dashboard_url, "ray_token_path": head.token_path}
                    )
                    keeper = HeadKeeper(head).start()
                _serve(settings, listener, keeper)
        except Interruption:  # a signal is this command's normal end
            if own_head and head is None:
                head = LocalHead.find(settings.state_dir)  # it came between the start and the name here
        finally:
            with ignore_signals():
                if keeper is not None:
                    keeper.stop()
                    head = keeper.head
                if mark is not None:
                    mark.close()
                if head is not None:
                    try:
                        _leave(head, keep_ray)
                    except OSError as error:
                        cause = f"{error.filename or head.state_file}: {error.strerror}"
                        raise CommandError(
                            f"Ray could not be stopped ({cause}); stop it with 'shardyard down'"
                        ) from None


def down(
    state_dir: StateDir = None,
    force: Annotated[
        bool, typer.Option(help="Even if jobs are running; the next 'shardyard up' resumes them.")
    ] = False,
) -> None:
    """Stop the Ray head that 'shardyard up' left running."""
    from service.cli.local import settings_for
    from service.head.local_head import LocalHead
    from service.head.record import changing, is_used, record_file

    settings = settings_for(state_dir=state_dir)
    state_file = record_file(settings.state_dir)
    if not state_file.exists():
        print(f"no Ray head is running for {settings.state_dir}")
        return
    earlier_head = LocalHead.find(settings.state_dir)
    with changing(state_file, on_wait=_announce_wait):
        # Look again: the process that held the lock may have started or stopped a head.
        head = LocalHead.find(settings.state_dir)
        if head is not None and not force:
            _require_idle(head, started_meanwhile=earlier_head is None or earlier_head.folder != head.folder)
        if head is None and not state_file.exists():
            print(f"the Ray head of {settings.state_dir} has already ended")
        elif head is None:
            LocalHead.stop_recorded(settings.state_dir)
            print("the Ray head had partly ended; its remaining processes are stopped")
        else:
            head.stop()
            note = "; a 'shardyard up' that used it is still running: end it, too" if is_used(state_file) else ""
            print(f"Ray stopped{note}")


def _require_idle(head: "LocalHead", started_meanwhile: bool) -> None:
    """Raises CommandError if jobs run on the head, or if a `shardyard up` has started to use it meanwhile
    (`started_meanwhile`)."""
    from service.cli.failures import CommandError
    from service.cli.ray_jobs import unfinished_jobs
    from service.control.scheduling.policies import MAX_LOST_STARTS, MAX_SETBACKS
    from service.head.ray_start import LocalHeadError
    from service.head.record import is_used

    if started_meanwhile and is_used(head.state_file):
        raise CommandError(
            "a 'shardyard up' has just started this Ray head and uses it: end that with Ctrl-C, or "
            "run 'shardyard down' again to stop Ray anyway"
        )
    with suppress(LocalHeadError):
        head = head.with_dashboard()  # which lists the jobs
    running = unfinished_jobs(head.dashboard_url, head.token_path)
    if running != []:
        jobs = _count(running) if running else "Ray does not respond, so jobs may be running"
        raise CommandError(
            f"{jobs} on this Ray head; cancel or pause them first, or use --force: the next "
            f"'shardyard up' resumes them from their last checkpoints (the {MAX_SETBACKS}th loss "
            f"without progress pauses a job, or the {MAX_LOST_STARTS}th if its workers had not "
            "started)"
        )


def _announce_wait() -> None:
    print("another command is starting or stopping Ray: waiting for it ...", flush=True)


def _absolute(root: str) -> str:
    """Local folder as an absolute path, as job files name it; URLs unchanged."""
    from moe.storage.home import expand_home

    return root if "://" in root else str(expand_home(root).absolute())


def _require_folders(roots: Sequence[str]) -> None:
    """Check that local data roots exist. Raises Misuse."""
    from service.cli.failures import Misuse

    for root in roots:
        if "://" not in root and not Path(root).is_dir():
            raise Misuse(f"--data-root (={root!r}) must be an existing folder; create it, or name another")


def _bind_socket(settings: "Settings") -> socket.socket:
    """Bind the port before anything slow is started. Raises Misuse if that fails."""
    from service.cli.failures import Misuse

    try:
        addresses = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Misuse(f"host (={settings.host!r}) must be a name or an address of this machine ({error})") from None
    family, _, _, _, address = addresses[0]
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise Misuse(
            f"cannot listen on {settings.host}:{settings.port} ({error.strerror}): is another "
            "'shardyard up' running? Use --port N for another port, 0 for any"
        ) from None
    return listener


def _head(settings: "Settings", num_cpus: int | None) -> "LocalHead":
    """This state folder's running head, or a new one. It must be marked as used."""
    from service.cli.checks import available_cores, num_usable_gpus
    from service.cli.failures import CommandError
    from service.head.local_head import LocalHead
    from service.head.ray_start import LocalHeadError
    from service.head.record import changing, record_file

    with changing(record_file(settings.state_dir), on_wait=_announce_wait):
        # Look only now, with the lock: another command may have stopped the head, and none stops it from here on.
        if (head := LocalHead.find(settings.state_dir)) is None:
            cores = num_cpus or max(MIN_LOGICAL_CPUS, int(available_cores()))
            print(f"starting Ray with {cores} CPUs (about 20 s) ...", flush=True)
            try:
                return LocalHead.start(settings.state_dir, num_cpus=cores, num_gpus=num_usable_gpus())
            except LocalHeadError as error:
                raise CommandError(str(error)) from None
        if not head.dashboard.running():
            print("Ray's dashboard is not running: restarting it; jobs continue", flush=True)
            try:
                head = head.with_dashboard()
            except LocalHeadError as error:
                raise CommandError(f"{error}\nstop Ray, and the jobs on it, with 'shardyard down --force'") from None
    print(f"Ray is already running, with {head.num_cpus} CPUs: {head.dashboard_url}", flush=True)
    return head


def _serve(settings: "Settings", listener: socket.socket, keeper: "HeadKeeper | None") -> None:
    """Run the control plane until a signal. Raises CommandError if it does not start."""
    import threading

    from service.cli.failures import CommandError
    from service.control.launcher.build import build_launcher
    from service.control.server import serve

    answers = threading.Event()
    threading.Thread(target=_welcome, args=(settings, listener, answers), daemon=True).start()
    launcher = build_launcher(settings, keeper.trouble if keeper else lambda: None)
    with suppress(SystemExit):  # uvicorn raises it if the app did not start
        serve(settings, launcher, listener)
    if not answers.is_set():
        raise CommandError("the control plane did not start; see the lines above")


def _welcome(settings: "Settings", listener: socket.socket, answers: "threading.Event") -> None:
    """Print all addresses and folders once it responds."""
    import time

    from service.client import Client, ClientError

    host, port = listener.getsockname()[:2]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    with Client(f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}") as client:
        while not answers.is_set():
            try:
                client.healthy()
                answers.set()
            except ClientError:
                time.sleep(0.05)  # creating its database, or failed: this process then ends
        print(_greeting(settings, client.url), flush=True)


def _greeting(settings: "Settings", url: str) -> str:
    from service.cli.options import program
    from service.client.settings import DEFAULT_URL
    from service.control.launcher.build import offers_shared

    cluster_line = f"Ray dashboard  {settings.ray_dashboard_url}"
    if not offers_shared(settings):
        namespace = settings.kuberay.namespace
        where = f"namespace {namespace}" if namespace else "the namespace of the credentials"
        cluster_line = f"Kubernetes     {where}: a Ray cluster for each job"
    elsewhere = "" if url == DEFAULT_URL else f"export SHARDYARD_URL={url}\n  "
    if settings.token is not None:
        elsewhere = f"export SHARDYARD_TOKEN=...    # as it is set here\n  {elsewhere}"
    asks = f"  Ray token      in {settings.ray_token_path}\n" if settings.ray_token_path else ""
    return (
        f"\n"
        f"Shardyard is up\n"
        f"  API            {url}\n"
        f"  API docs       {url}/docs\n"
        f"  {cluster_line}\n"
        f"{asks}"
        f"  state          {settings.state_dir}\n"
        f"\n"
        f"In another terminal:\n"
        f"  {elsewhere}{program()} submit examples/translate-100-to-english.yaml --watch\n"
        f"\n"
        f"Ctrl-C stops it."
    )


def _leave(head: "LocalHead", keep_ray: bool | None) -> None:
    """Stop the head, unless others or unfinished jobs use it."""
    from service.cli.ray_jobs import unfinished_jobs
    from service.head.record import changing, is_used

    if is_used(head.state_file):  # also counts a head that is being started
        print(USED_ELSEWHERE)
        return
    with changing(head.state_file, on_wait=_announce_wait):
        if is_used(head.state_file):
            print(USED_ELSEWHERE)
            return
        if keep_ray is None and not head.state_file.exists():
            keep_ray = False  # the record was removed: no later command would find this Ray
        if keep_ray is None:
            running = unfinished_jobs(head.dashboard_url, head.token_path) if head.running() else []
            keep_ray = running is None or bool(running)
            if keep_ray:
                reason = _count(running) if running else "Ray does not respond, so jobs may be running"
                print(f"{reason}: Ray is left running. 'shardyard up' continues them; 'shardyard down' stops Ray")
        elif keep_ray:
            print(f"Ray is left running: {head.dashboard_url}. 'shardyard down' stops it")
        if not keep_ray:
            head.stop()
            print("Ray stopped")


def _count(submissions: list[str]) -> str:
    return f"{len(submissions)} job{' is running' if len(submissions) == 1 else 's are running'}"
