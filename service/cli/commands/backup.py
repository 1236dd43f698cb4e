"""`backup` and `restore` of a control plane's database."""

from typing import Annotated

import typer

from service.cli.options import StateDir


def backup(
    location: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Folder of backups: a path, or a URL (s3://, gs://).")
    ],
    keep: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Afterwards, remove all but the newest N, and incomplete ones."),
    ] = None,
    state_dir: StateDir = None,
) -> None:
    """Back up jobs, events and keys, also while the control plane runs.

    Job files (checkpoints, logs) are not included: the storage needs its own backup or versioning. Prints the backup's
    folder. Keep it private: it has keys that authorize running attempts.
    """
    from moe.storage.folder import Folder
    from service.cli.failures import CommandError
    from service.cli.local import open_database, settings_for
    from service.control.report.tokens import KEY_FILE
    from service.control.store.backup import remove_older, write_backup

    folder = Folder(_usable(location))
    settings = settings_for(state_dir=state_dir)
    key_path = settings.state_dir / KEY_FILE
    with open_database(settings) as database:
        if database.revision() is None:
            raise CommandError(f"there is nothing to back up: the database of {settings.state_dir} has no tables")
        key = key_path.read_bytes() if database.is_sqlite and key_path.exists() else None
        name, manifest = write_backup(database, folder, key)
    print(folder.url_of(name))
    for older in remove_older(folder, keep) if keep else ():
        print(f"removed {folder.url_of(older)}")
    rows = manifest.rows
    typer.echo(f"{rows['jobs']} jobs and {rows['events']} events, revision {manifest.revision}", err=True)


def restore(
    location: Annotated[
        str, typer.Argument(metavar="FOLDER", help="A backup, or a folder of backups: the newest is restored.")
    ],
    state_dir: StateDir = None,
) -> None:
    """Restore a backup into an empty database.

    No control plane may use the database meanwhile. The next 'shardyard up' adopts running jobs; 'shardyard recover'
    then adds jobs that were posted after the backup.
    """
    from moe.storage.folder import Folder
    from service.cli.failures import CommandError
    from service.cli.local import open_database, settings_for
    from service.control.report.tokens import KEY_FILE, write_key
    from service.control.store.backup import BackupError, list_backups, read_backup, read_manifest

    folder = Folder(_usable(location))
    if names := list_backups(folder):
        folder = folder.subfolder(names[0])
    settings = settings_for(state_dir=state_dir)
    settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        manifest = read_manifest(folder)
        with open_database(settings) as database:
            key = read_backup(database, folder, manifest)
    except BackupError as error:
        raise CommandError(str(error)) from None
    if key is not None:
        write_key(settings.state_dir / KEY_FILE, key)
    rows = manifest.rows
    print(f"restored {rows['jobs']} jobs and {rows['events']} events of {manifest.created_at} from {folder.url}")


def _usable(location: str) -> str:
    """`location` as an absolute path or a URL. Raises Misuse for a file system that is not installed."""
    from moe.storage.home import expand_home
    from moe.storage.packages import problem_of
    from service.cli.failures import Misuse

    if (problem := problem_of(location)) is not None:
        raise Misuse(f"FOLDER (={location!r}) {problem}")
    return location if "://" in location else str(expand_home(location).absolute())
