"""Settings of the local control plane."""

import re
from contextlib import closing
from typing import TYPE_CHECKING, Any

from service.cli.failures import Misuse

if TYPE_CHECKING:
    from service.settings import Settings

DEMO_FOLDER = "demo"
"""Folder of `shardyard demo`, below the state folder."""


def settings_for(**overrides: Any) -> "Settings":
    """Settings from the environment and the command line's overrides. Raises Misuse."""
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from service.settings import Settings

    try:
        return Settings(**{name: value for name, value in overrides.items() if value is not None})
    except SettingsError as error:  # pydantic names only the field
        match = re.search(r'"(\w+)"', str(error))
        name = f"SHARDYARD_{match[1].upper()}" if match else str(error)
        raise Misuse(f"{name} must be a JSON list, such as '[\"/data\"]'") from None
    except ValidationError as error:
        raise Misuse("\n".join(_in_words(problem) for problem in error.errors())) from None


def require_usable(settings: "Settings") -> None:
    """Check that these settings' state and storage can be used. Raises Misuse."""
    from sqlalchemy.exc import SQLAlchemyError

    from service.control.jobs.roots import StorageRoots
    from service.control.store.database import Database

    remedy = "SHARDYARD_STATE_DIR and SHARDYARD_DATABASE_URL say where state is kept"
    try:
        StorageRoots(settings.storage_roots)
        settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with closing(Database(settings.database_url)) as database:
            database.migrate()
            with database.write():
                pass  # fails for a read-only file
    except ValueError as error:
        raise Misuse(str(error)) from None
    except OSError as error:
        raise Misuse(f"{error.filename or 'the database'}: {error.strerror or error}; {remedy}") from None
    except (SQLAlchemyError, ImportError) as error:
        # The first line is the database's message; the others are SQL.
        raise Misuse(f"cannot use the database ({str(error).splitlines()[0]}); {remedy}") from None


def _in_words(problem: Any) -> str:
    from moe.spec.problems import dotted_path, rule_of

    place = dotted_path(problem["loc"])
    rule = rule_of(problem) if place else str(problem["msg"]).removeprefix("Value error, ")
    return f"{place} {rule}".strip()
