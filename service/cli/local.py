"""Settings of the local control plane."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from service.cli.failures import Misuse

if TYPE_CHECKING:
    from pydantic import ValidationError

    from service.control.store.database import Database
    from service.settings import Settings

DEMO_FOLDER = "demo"
"""Folder of `shardyard demo`, below the state folder."""


def settings_for(**overrides: Any) -> "Settings":
    """Settings from the environment and the command line's overrides. Raises Misuse."""
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from service.cli.json_variables import json_problems
    from service.settings import Settings

    try:
        return Settings(**{name: value for name, value in overrides.items() if value is not None})
    except RecursionError:
        raise Misuse("a SHARDYARD_* variable is nested too deeply; write it as a JSON list or object") from None
    except SettingsError as error:  # pydantic names only the field
        raise Misuse("\n".join(map(str, json_problems(Settings))) or str(error)) from None
    except ValidationError as error:
        raise Misuse("\n".join(_all_in_words(error))) from None


def require_usable(settings: "Settings") -> None:
    """Check that these settings' state and storage can be used, and migrate the database. Raises Misuse."""
    from service.control.jobs.roots import StorageRoots

    _require_packages(settings)
    try:
        StorageRoots(settings.storage_roots)
    except ValueError as error:
        raise Misuse(str(error)) from None
    migrate(settings)


_REMEDY = "SHARDYARD_STATE_DIR and SHARDYARD_DATABASE_URL say where state is kept"


def migrate(settings: "Settings") -> tuple[str | None, str]:
    """Migrate the database of these settings; revisions before and after. Raises Misuse if it cannot be used."""
    try:
        settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open_database(settings) as database:
            revisions = database.migrate()
            with database.write():
                pass  # fails for a read-only file
            return revisions
    except OSError as error:
        raise Misuse(f"{error.filename or 'the database'}: {error.strerror or error}; {_REMEDY}") from None


@contextmanager
def open_database(settings: "Settings") -> Iterator["Database"]:
    """The database of these settings. Raises Misuse if it cannot be used; OSError."""
    from sqlalchemy.exc import SQLAlchemyError

    from service.control.errors import ServiceError
    from service.control.store.database import Database, NewerDatabase

    try:
        with closing(Database(settings.database_url)) as database:
            yield database
    except (NewerDatabase, ServiceError) as error:
        raise Misuse(str(error)) from None
    except ModuleNotFoundError as error:
        install = "pip install 'shardyard[postgres]'" if error.name == "psycopg" else f"install {error.name}"
        raise Misuse(f"database_url needs the package {error.name}, which is not installed here; {install}") from None
    except (SQLAlchemyError, ImportError) as error:
        # The first line is the database's message; the others are SQL.
        raise Misuse(f"cannot use the database ({str(error).splitlines()[0]}); {_REMEDY}") from None


def _require_packages(settings: "Settings") -> None:
    """Check that the file systems of URLs are installed. Raises Misuse."""
    from moe.storage.packages import problem_of

    urls = [("storage_roots", url) for url in settings.storage_roots]
    urls += [("data_roots", url) for url in settings.data_roots]
    problems = [f"{name} (={url!r}) {problem}" for name, url in urls if (problem := problem_of(url)) is not None]
    if problems:
        raise Misuse("\n".join(problems))


def _all_in_words(error: "ValidationError") -> Iterator[str]:
    """Yield a line per problem. Only values of Kubernetes settings are shown, since others may be secret."""
    from moe.spec.problems import dotted_path, problems_of, rule_of

    inputs = {dotted_path(entry["loc"]): entry["input"] for entry in error.errors()}
    for problem in problems_of(error):
        if problem.path.startswith("kuberay"):
            is_typed_wrong = problem.code == "wrong_type"  # also a mapping in place of a list is shown
            yield str(replace(problem, value=inputs.get(problem.path)) if is_typed_wrong else problem)
    for entry in error.errors():
        path = dotted_path(entry["loc"])
        if not path.startswith("kuberay"):
            rule = rule_of(entry) if path else str(entry["msg"]).removeprefix("Value error, ")
            yield f"{path} {rule}".strip()
