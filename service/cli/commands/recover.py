"""`recover`: restores jobs missing from the database, from their storage."""

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from service.cli.options import AsJson, StateDir


def recover(
    state_dir: StateDir = None,
    ray_dashboard_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The Ray cluster to run attempts on. [that of 'shardyard up']")
    ] = None,
    ray_token_path: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with that cluster's token, if it has one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Restore jobs that are in storage but not in the database.

    'shardyard up' does so by itself if the database has no jobs. Running attempts are adopted, finished ones have
    their results again; a job whose attempt is gone is paused, and nothing is launched. It may be repeated, also while
    the control plane runs.
    """
    from service.cli.failures import Misuse
    from service.cli.local import require_usable, settings_for
    from service.cli.view.output import console, print_json
    from service.control.jobs.roots import StorageRoots
    from service.control.kubernetes.errors import Misconfigured
    from service.control.launcher.build import build_launcher
    from service.control.report.hub import Hub
    from service.control.report.ingest import Ingest
    from service.control.report.tokens import TokenMint
    from service.control.scheduling.recovery import Recovery
    from service.control.store.database import Database
    from service.control.sweeps.recovery import SweepRecovery
    from service.head.local_head import LocalHead

    settings = settings_for(state_dir=state_dir, ray_dashboard_url=ray_dashboard_url, ray_token_path=ray_token_path)
    require_usable(settings)
    head = LocalHead.find(settings.state_dir) if settings.launcher == "ray_jobs" else None
    if head is not None and "ray_dashboard_url" not in settings.model_fields_set:
        settings = settings.model_copy(
            update={"ray_dashboard_url": head.dashboard_url, "ray_token_path": head.token_path}
        )
    try:
        launcher = build_launcher(settings)
    except Misconfigured as error:
        raise Misuse(str(error)) from None
    out = console()
    with closing(launcher), closing(Database(settings.database_url)) as database:
        database.migrate()
        mint = TokenMint.of(database, settings.state_dir)
        ingest = Ingest(database, Hub(), mint, on_phase=lambda: None)
        roots = StorageRoots(settings.storage_roots)
        sweeps = SweepRecovery(database, roots, settings.owner)
        recovery = Recovery(
            database, roots, launcher, ingest, settings.owner, settings.state_dir, recover_sweeps=sweeps.run
        )
        outcome = recovery.run(
            lambda id, name, standing: (
                None
                if as_json
                else out.print(f"{id}  {standing.state:<10}  {name}: {standing.reason}", soft_wrap=True, markup=False)
            )
        )
    if as_json:
        print_json(
            {
                "jobs": [
                    {"id": id, "name": name, "state": standing.state, "reason": standing.reason}
                    for id, name, standing in outcome.jobs
                ],
                "skipped": [{"storage": storage, "reason": reason} for storage, reason in outcome.skipped],
            }
        )
    else:
        for storage, reason in outcome.skipped:
            out.print(f"not recovered: {storage}: {reason}", soft_wrap=True, markup=False)
        count = len(outcome.jobs)
        places = ", ".join(settings.storage_roots)
        print(f"{count} job{'' if count == 1 else 's'} recovered from {places}")
    raise typer.Exit(bool(outcome.skipped))
