"""Progress of an upload, and the listing of uploads."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from service.cli.view.amounts import moment, num_bytes
from service.cli.view.listing import Column
from service.client.uploads import OnProgress, UploadProgress


@contextmanager
def upload_progress() -> Iterator[OnProgress]:
    """Function that shows the progress on standard error, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks = {phase: progress.add_task(phase, visible=False) for phase in ("hashing", "sending")}

        def show(now: UploadProgress) -> None:
            progress.update(tasks[now.phase], completed=now.done_bytes, total=now.total_bytes, visible=True)

        yield show


def upload_columns(uploads: Sequence[dict[str, Any]]) -> list[Column]:
    """Columns of `uploads ls`. Digests are never cut."""
    return [
        Column("UPLOAD", [Text(upload["digest"]) for upload in uploads]),
        Column("FILES", [Text(f"{upload['num_files']:,}") for upload in uploads], can_shrink=2),
        Column("SIZE", [Text(num_bytes(upload["size_bytes"])) for upload in uploads], can_shrink=1),
        Column("CREATED", [Text(moment(upload["created_at"])) for upload in uploads], can_shrink=3),
    ]
