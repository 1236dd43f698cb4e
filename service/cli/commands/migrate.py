"""`migrate`: brings the database's tables to this release."""

from service.cli.options import StateDir


def migrate(state_dir: StateDir = None) -> None:
    """Create the database's tables, or bring them to this release.

    'shardyard up' does so by itself. A step before it lets several control planes start with the tables ready. Control
    planes of the previous release may keep running meanwhile.
    """
    from service.cli import local

    before, after = local.migrate(local.settings_for(state_dir=state_dir))
    if before == after:
        print(f"the tables are those of this release (revision {after})")
    else:
        print(f"migrated the tables from {f'revision {before}' if before else 'an empty database'} to revision {after}")
