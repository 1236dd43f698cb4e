"""`upload://DIGEST/NAME` in specs: replaced by the locations of the files, before a spec is parsed."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from moe.spec.errors import Problem, SpecError
from moe.spec.patterns import matches
from service.control.uploads.uploads import Manifest, Uploads
from service.wire.uploads import PREFIX

_MAX_DEPTH = 40
"""Depth to which a body is searched: no valid spec is deeper."""
_FREE_TEXT = ("name", "labels")
"""Top-level fields that name no files."""


def names_upload(body: Any) -> bool:
    """Whether a posted body names an upload."""
    paths = []

    def note(path: str, text: str) -> str:
        paths.append(path)
        return text

    _replace(body, "", note)
    return bool(paths)


def replace_uploads(body: Any, uploads: Uploads) -> Any:
    """Replace the `upload://` names of files and patterns in a body by their URLs or paths. Raises SpecError with a
    problem for every missing upload, and Unavailable."""
    if not names_upload(body):
        return body
    manifests, problems = uploads.manifests(), list[Problem]()

    def replace(path: str, text: str) -> str:
        digest, _, name = text.removeprefix(PREFIX).partition("/")
        if problem := _problem(path, text, name, manifests.get(digest)):
            problems.append(problem)
        return f"{uploads.url}/{digest}/{name}"

    replaced = _replace(body, "", replace)
    if problems:
        raise SpecError(problems)
    return replaced


def _problem(path: str, text: str, name: str, manifest: Manifest | None) -> Problem | None:
    if manifest is None:
        rule = "is no upload of this service"
        return Problem("not_found", path, text, rule, "upload the files with 'shardyard upload PATH'")
    names = list(manifest.spec.files)
    if any(matches(name, other) or other.startswith(f"{name.rstrip('/')}/") for other in names) or not name:
        return None
    similar_names = get_close_matches(name, names, 3) or names[:3]
    return Problem("not_found", path, text, "is no file of the upload", f"use {' or '.join(similar_names)}")


def _replace(value: Any, path: str, replace: Callable[[str, str], str], depth: int = 0) -> Any:
    if isinstance(value, str):
        return replace(path, value) if value.startswith(PREFIX) else value
    if depth > _MAX_DEPTH:
        return value
    if isinstance(value, Mapping):
        return {
            key: item
            if depth == 0 and key in _FREE_TEXT
            else _replace(item, f"{path}.{key}" if path else str(key), replace, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_replace(item, f"{path}[{index}]", replace, depth + 1) for index, item in enumerate(value)]
    return value
