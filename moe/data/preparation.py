"""Preparation of a corpus: a folder with everything that a run reads, built once per content."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from moe.data.cache import Cache, link
from moe.data.corpus import Corpus
from moe.spec import spec_error
from moe.spec.bad_records import fields_without_effect
from moe.spec.base import Spec

_TOKENIZERS, _STATS = "tokenizers", "stats.json"
_ADDED = {"paths": None, "dataset": None, "split": None, "sources": None, "packing": "by_source", "lang": None}
"""Fields that specs did not have when folders were first built, with the values that change nothing: they are not part
of keys, so that folders and checkpoints stay valid."""


def content_key(corpus: Corpus, data: Spec, facts: Mapping[str, Any], exclude: Mapping[str, Any] | None = None) -> str:
    """Hash of everything that determines the prepared content: the corpus, the fields of its spec apart from `exclude`
    (as pydantic's), the version of the tokenizers library, and further `facts`."""
    without_effect = dict.fromkeys(fields_without_effect(data), True)
    fields = data.model_dump(mode="json", exclude={**(exclude or {}), **without_effect})
    facts = {
        **facts,
        "corpus": corpus.fingerprint(),
        "data": _without_added(fields),
        "tokenizers": metadata.version("tokenizers"),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _without_added(value: Any) -> Any:
    """The fields of a spec without added ones that have no effect."""
    if isinstance(value, dict):
        return {
            name: _without_added(element)
            for name, element in value.items()
            if name not in _ADDED or element != _ADDED[name]
        }
    return [_without_added(element) for element in value] if isinstance(value, list) else value


def find_or_build(
    current_key: Callable[[], str],
    build: Callable[[Path], None],
    report: Callable[[str], None],
    cache_dir: str | Path,
    shared_dir: str | Path | None = None,
) -> Path:
    """Return the prepared folder, from `cache_dir` by its content key, or filled there by `build`. Several processes
    may call this at once; one of them builds. Raises SpecError if the key changes during the build.

    `shared_dir`: a folder that several caches of this machine share. The folder is built there, once, and linked into
    `cache_dir`.
    """
    key = current_key()

    def fill(empty: Path) -> None:
        build(empty)
        if current_key() != key:
            remedy = "leave its files unchanged until the run starts, and submit it again"
            raise spec_error("changed", "data", None, "changed while it was read", remedy)

    def fill_from_shared(empty: Path) -> None:
        assert shared_dir is not None
        try:
            shared_folder = Cache(shared_dir, report).find_or_build(key, fill)
        except OSError as error:  # for example a read-only home folder
            report(f"cannot use {shared_dir} ({error.strerror}): building {key} in {cache_dir}")
            fill(empty)
        else:
            link(shared_folder, empty)

    return Cache(cache_dir, report).find_or_build(key, fill if shared_dir is None else fill_from_shared)


def write_tokenizers(folder: Path, files: Mapping[str, bytes]) -> None:
    """Add tokenizer files to a prepared folder."""
    (folder / _TOKENIZERS).mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / _TOKENIZERS / name).write_bytes(content)


def read_tokenizer(folder: Path, name: str) -> bytes:
    """A tokenizer file of a prepared folder. Raises FileNotFoundError."""
    return (folder / _TOKENIZERS / name).read_bytes()


def tokenizer_names(folder: Path) -> Iterable[str]:
    """Names of the tokenizer files of a prepared folder."""
    return sorted(path.name for path in (folder / _TOKENIZERS).iterdir())


def write_stats(folder: Path, stats: Mapping[str, Any]) -> None:
    """Add statistics of the build to a prepared folder."""
    (folder / _STATS).write_text(json.dumps(stats, ensure_ascii=False, indent=1), encoding="utf-8")


def read_stats(folder: Path) -> dict[str, Any]:
    """Statistics of the build."""
    stats: dict[str, Any] = json.loads((folder / _STATS).read_text(encoding="utf-8"))
    return stats
