"""`download`: a job's files, through the API, into a local folder."""

from pathlib import Path
from typing import Annotated

import typer

from service.cli.options import AsJson, JobId, Url
from service.wire.file_kinds import FileKind


def download(
    job: JobId,
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Folder to create the job's folder in. [the current one]")
    ] = None,
    kind: Annotated[
        list[FileKind] | None, typer.Option("--kind", help="Only files of this kind; repeat for several.")
    ] = None,
    latest: Annotated[bool, typer.Option("--latest", help="Only the newest checkpoint.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Download a job's spec, results, checkpoints and logs.

    For users without access to its storage. Each file appears under its name only when complete, and checkpoint files
    only if their checksums match. A repeated download resumes and fetches what is new.
    """
    from dataclasses import asdict

    from service.cli.server import connect, find_job
    from service.cli.view.amounts import num_bytes
    from service.cli.view.output import print_json

    with connect(url) as client:
        handle = find_job(client, job)
        result = handle.download(folder or Path(), kind, latest)
    if as_json:
        print_json({**asdict(result), "folder": str(result.folder)})
        return
    for name in result.gone:
        typer.echo(f"checkpoint {name} was removed by the job during the download", err=True)
    kept_note = f"; {len(result.kept):,} already present" if result.kept else ""
    count = len(result.fetched) + len(result.kept)
    print(f"{result.folder}: {count:,} file{'' if count == 1 else 's'}, {num_bytes(result.num_bytes)}{kept_note}")
