"""`migrate`: brings the database's tables to this release."""

from service.cli.options import StateDir


def migrate(state_dir: StateDir = None) -> None:
    """Create the database's tables, or bring them to this release.

    'shardyard up' does so itself. Run this first to have the tables ready before several control planes start. Control
    planes of the previous release may keep running meanwhile.
    """
    from service.cli import local

    old, new = local.migrate(local.settings_for(state_dir=state_dir))
    if old == new:
        print(f"the tables are up to date (revision {new})")
    else:
        print(f"migrated the tables from {f'revision {old}' if old else 'an empty database'} to revision {new}")
