"""Backups from SQLite to PostgreSQL and back."""

from contextlib import closing
from pathlib import Path

import pytest

from moe.storage.folder import Folder
from service.control.report.tokens import TokenMint
from service.control.store.backup import read_backup, read_manifest, write_backup
from service.control.store.database import Database
from tests.service.control_plane import ControlPlane
from tests.service.test_backup import rows_of


@pytest.mark.slow
def test_a_control_plane_moves_to_postgresql_and_back(url: str, tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path).start()
    try:
        first = plane.finished_job(name="first")["id"]
        plane.terminate()
        place = Folder(str(tmp_path / "backups"))
        with closing(Database(f"sqlite:///{plane.database}")) as sqlite, closing(Database(url)) as postgres:
            name, manifest = write_backup(sqlite, place, None)
            read_backup(postgres, place.subfolder(name), read_manifest(place.subfolder(name)))
            assert rows_of(postgres) == rows_of(sqlite)
        plane.start(database_url=url)
        assert plane.job(first)["state"] == "succeeded"
        second = plane.finished_job(name="second")["id"]
        plane.terminate()
        with closing(Database(url)) as postgres, closing(Database(f"sqlite:///{tmp_path / 'back.db'}")) as back:
            name, later_manifest = write_backup(postgres, place, None)
            assert later_manifest.last_numbers["jobs"] == manifest.last_numbers["jobs"] + 1
            token = TokenMint.of(postgres, tmp_path).token(second, 1)
            read_backup(back, place.subfolder(name), read_manifest(place.subfolder(name)))
            assert rows_of(back) == rows_of(postgres)
            assert TokenMint.of(postgres, tmp_path / "elsewhere").token(second, 1) == token
    finally:
        plane.close()
