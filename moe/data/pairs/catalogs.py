"""The corpus `catalogs`: message catalogs of installed software, translation to English message."""

import hashlib
from collections.abc import Iterator
from functools import cached_property
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from moe.data.pairs.corpus import PairCorpus, require_languages
from moe.data.pairs.gettext_files import UnreadableCatalog, read_catalog
from moe.data.pairs.pair import Pair
from moe.spec import CatalogsSpec, spec_error

PACKAGES = ("pycountry", "django")
SYSTEM_FOLDER = Path("/usr/share/locale")
_ENGLISH = ("en", "C", "POSIX")


class _CatalogFile(NamedTuple):
    lang: str
    name: str
    """The path within its source, the same on every machine."""
    path: Path


class Catalogs(PairCorpus):
    """Catalogs of pycountry and Django, and of the system on request, read from where they are installed.

    A locale is a language: pt and pt_BR, or sr and sr@latin, are separate. English locales are left out.
    """

    def __init__(self, data: CatalogsSpec, system_folder: Path = SYSTEM_FOLDER) -> None:
        self._data = data
        self._system_folder = system_folder
        self._unreadable: list[str] = []
        self._num_read = 0

    @cached_property
    def _all_files(self) -> list[_CatalogFile]:
        files = []
        if "pip" in self._data.sources:
            for package in PACKAGES:
                folder = _package_folder(package)
                files += [_catalog_file(path, package, folder) for path in sorted(folder.rglob("LC_MESSAGES/*.[mp]o"))]
        if "system" in self._data.sources:
            folder = self._system_folder
            files += [_catalog_file(path, "system", folder) for path in sorted(folder.glob("*/LC_MESSAGES/*.mo"))]
        compiled_paths = {file.path for file in files if file.path.suffix == ".mo"}
        return [
            file
            for file in files
            if file.lang.replace("@", "_").partition("_")[0] not in _ENGLISH
            and not (file.path.suffix == ".po" and file.path.with_suffix(".mo") in compiled_paths)
        ]

    @cached_property
    def _files(self) -> list[_CatalogFile]:
        languages = self._data.languages
        return [file for file in self._all_files if languages is None or file.lang in languages]

    def check(self) -> tuple[str, ...]:
        if not self._all_files:
            raise spec_error("not_found", "data.sources", list(self._data.sources),
                             "has no message catalogs on this machine", "add pip")  # fmt: skip
        require_languages(self._data.languages, {file.lang for file in self._all_files})
        return ()

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        if "pip" in self._data.sources:
            digest.update(repr([(package, metadata.version(package)) for package in PACKAGES]).encode())
        for file in self._files:
            content = file.path.read_bytes()
            digest.update(f"\0{file.name}\0{len(content)}\0".encode())
            digest.update(content)
        return digest.hexdigest()

    def pairs(self) -> Iterator[Pair]:
        self._unreadable = []
        for num_read, file in enumerate(self._files):
            self._num_read = num_read
            try:
                messages = list(read_catalog(file.path))
            except UnreadableCatalog as error:
                # One damaged catalog among many does not prevent training; it is reported.
                self._unreadable.append(f"{file.name} {error}")
                continue
            for translation, message in messages:
                yield Pair(file.lang, translation, message)

    def share_read(self) -> float | None:
        return self._num_read / max(1, len(self._files))

    def facts(self) -> dict[str, object]:
        return {"corpus": "catalogs", "files": len(self._files), "unreadable": list(self._unreadable)}


def _package_folder(package: str) -> Path:
    """The folder of a package, found without importing it."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise spec_error("not_installed", "data.sources", "pip", f"requires the package {package}",
                         f"install it: pip install {package}")  # fmt: skip
    return Path(spec.submodule_search_locations[0])


def _catalog_file(path: Path, source: str, folder: Path) -> _CatalogFile:
    return _CatalogFile(path.parent.parent.name, f"{source}/{path.relative_to(folder).as_posix()}", path)
