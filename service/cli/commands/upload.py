"""`upload`: files to the service, for jobs' data; `uploads`: those that are there."""

from pathlib import Path
from typing import Annotated

import typer

from service.cli.options import AsJson, Url

Upload = Annotated[str, typer.Argument(metavar="DIGEST", help="The upload's digest, or its upload:// URL.")]
MAX_LINES = 20
"""Files of an upload that are printed one by one."""
app = typer.Typer(name="uploads", no_args_is_help=True, help="List and remove uploaded files.")


def upload(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A file, or a folder with all below it.")],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Upload files for jobs' data, and print the names to paste into a spec.

    A repeated upload resumes where the last one was cut, and sends nothing that the service has.
    Hidden files are left out.
    """
    from service.cli.server import connect
    from service.cli.view.amounts import num_bytes
    from service.cli.view.output import print_json
    from service.cli.view.uploads import upload_progress

    with connect(url) as client, upload_progress() as on_progress:
        stored = client.uploads.send(path, on_progress)
    if as_json:
        print_json(stored)
        return
    names = stored["files"]
    count = len(names)
    typer.echo(f"stored {count:,} file{'' if count == 1 else 's'}, {num_bytes(stored['size_bytes'])}", err=True)
    for name in names if count <= MAX_LINES else [f"*{Path(names[0]).suffix}"]:
        print(f"{stored['url']}/{name}")


@app.command()
def ls(url: Url = None, as_json: AsJson = False) -> None:
    """List the uploads."""
    from service.cli.server import connect
    from service.cli.view.listing import print_listing
    from service.cli.view.output import columns_of, console, print_json, say
    from service.cli.view.uploads import upload_columns

    with connect(url) as client:
        uploads = client.uploads.list()
    if as_json:
        print_json({"items": uploads})
    elif not uploads:
        say("no uploads yet; add one with 'shardyard upload PATH'")
    else:
        out = console()
        print_listing(upload_columns(uploads), out, columns_of(out))


@app.command()
def show(upload: Upload, url: Url = None, as_json: AsJson = False) -> None:
    """Print the names of an upload's files, as specs name them."""
    from service.cli.server import connect
    from service.cli.view.output import print_json

    with connect(url) as client:
        stored = client.uploads.show(upload)
    if as_json:
        print_json(stored)
        return
    for file in stored["files"]:
        print(f"{stored['url']}/{file['name']}")


@app.command()
def rm(upload: Upload, url: Url = None, as_json: AsJson = False) -> None:
    """Remove an upload.

    Refused while a job that has not ended names it.
    """
    from service.cli.server import connect
    from service.cli.view.amounts import num_bytes
    from service.cli.view.output import print_json

    with connect(url) as client:
        removed = client.uploads.remove(upload)
    if as_json:
        print_json(removed)
        return
    print(f"removed {removed['digest']} ({removed['num_files']:,} files, {num_bytes(removed['size_bytes'])})")
