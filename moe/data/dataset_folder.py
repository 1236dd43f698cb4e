"""Folders of datasets: as the library `datasets` saves them (`save_to_disk`), or as dataset repositories hold them."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from moe.data.compression import DAMAGED
from moe.data.data_file import DataFile, locate_files
from moe.data.locations import Location, Locator, NoFile
from moe.spec import ProblemCode, SpecError, spec_error
from moe.spec.base import MAX_PLACES
from moe.spec.data_files import FilesFields, Format

_DICT, _STATE = "dataset_dict.json", "state.json"
_MAX_JSON_BYTES = 16 << 20
_FILE_NAME, _SPLIT = re.compile(r"[A-Za-z0-9_.-]+\.arrow"), re.compile(r"\w+([.-]\w+)*")
_DEFAULT = "train"
_LAYOUTS = ("data/{}-*", "{}-*", "{}/*", "data/{}/*", "{}", "data/{}")
"""Names of a split's files in dataset repositories, without suffixes, in order of preference."""
_SUFFIXES: dict[str, Format] = {".parquet": "parquet", ".arrow": "arrow", ".json*": "jsonl"}
_SHARDS = "-*-of-*"


class DatasetFiles(NamedTuple):
    """Files of a split, in order, all of one format."""

    format: Format
    files: list[DataFile]


class DatasetFolder:
    """A folder, or the URL of one."""

    def __init__(self, locator: Locator, place: str, folder: str) -> None:
        """`place`: path in the spec."""
        self._locator, self._place, self._folder = locator, place, folder.rstrip("/") or "/"

    def files(self, split: str | None) -> DatasetFiles:
        """Files of a split; of `train` or the only one by default. Raises SpecError."""
        splits = self._json(_DICT)
        if splits is not None:
            name = self._choose(splits.get("splits"), split)
            return self._saved_files(f"{name}/", self._required_state(f"{name}/"))
        state = self._json(_STATE)
        if state is None:
            return self._repository_files(split or _DEFAULT)
        if split is not None and split != state.get("_split"):
            own = state.get("_split")
            own_text = "has none" if own is None else f"is of {own!r:.80}"
            rule = f"is not the split of {self._folder}, which {own_text}"
            raise spec_error("not_found", self._split_place, split, rule, "omit it, or name another folder")
        return self._saved_files("", state)

    @property
    def _split_place(self) -> str:
        return self._place.rpartition(".")[0] + ".split"

    def _broken(self, code: ProblemCode, rule: str, remedy: str) -> SpecError:
        return spec_error(code, self._place, self._folder, rule, remedy)

    def _choose(self, splits: Any, split: str | None) -> str:
        names = [name for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
        if not names or len(names) > MAX_PLACES or not all(map(_SPLIT.fullmatch, names)):
            raise self._broken("corrupt", f"has no names of splits in {_DICT}", "save the dataset again")
        if split is None and len(names) == 1:
            return names[0]
        if (split or _DEFAULT) in names:
            return split or _DEFAULT
        choices = ", ".join(names[:20])
        code: ProblemCode = "missing" if split is None else "not_found"
        raise spec_error(code, self._split_place, split, f"must be a split of {self._folder}", f"use one of {choices}")

    def _required_state(self, base: str) -> Mapping[str, Any]:
        state = self._json(base + _STATE)
        if state is None:
            raise self._broken("not_found", f"lacks {base}{_STATE}", "save the dataset again")
        return state

    def _saved_files(self, base: str, state: Mapping[str, Any]) -> DatasetFiles:
        """Files that a saved dataset consists of."""
        for key in ("_indices_data_files", "_indices_files"):
            if state.get(key):
                rule = f"has an indices mapping ({key} in {base}{_STATE}), which selects or reorders its rows"
                raise self._broken("unsupported", rule, "save it again: dataset.flatten_indices().save_to_disk(...)")
        entries = state.get("_data_files")
        entries = entries if isinstance(entries, list) else []
        names = [str(entry.get("filename")) for entry in entries if isinstance(entry, dict)]
        if not names or len(names) < len(entries) or not all(map(_FILE_NAME.fullmatch, names)):
            raise self._broken("corrupt", f"has no names of Arrow files in {base}{_STATE}", "save the dataset again")
        files = []
        for name in names:
            try:
                files += self._located(base + name)
            except NoFile:
                rule = f"lacks {base}{name}, which {base}{_STATE} names"
                raise self._broken("not_found", rule, "copy the folder again, with all files") from None
        return DatasetFiles("arrow", files)

    def _repository_files(self, split: str) -> DatasetFiles:
        """Files of a split in the layout of a dataset repository."""
        for layout in _LAYOUTS:
            for suffix, format in _SUFFIXES.items():
                pattern = layout.format(split) + suffix
                try:
                    files = self._located(pattern)
                except NoFile:
                    continue
                if layout.endswith("-*"):
                    self._require_all(layout.removesuffix("-*").format(split), suffix, len(files))
                return DatasetFiles(format, files)
        rule = (
            f"has neither {_DICT} nor {_STATE}, as a saved dataset has, nor files of the split {split!r}, "
            f"such as data/{split}-00000-of-00001.parquet"
        )
        raise self._broken("not_found", rule, "name another folder or split, or the files by paths")

    def _require_all(self, base: str, suffix: str, number: int) -> None:
        """Raise SpecError if files named `...-00000-of-00002` are not all there."""
        try:
            num_shards = len(self._located(f"{base}{_SHARDS}{suffix}"))
        except NoFile:
            return
        with_total = f"{base}-*-of-{num_shards:05d}*{suffix}"
        try:
            is_complete = len(self._located(with_total)) == num_shards == number
        except NoFile:
            is_complete = False
        if not is_complete:
            rule = f"lacks some of the files {base}{_SHARDS}{suffix}, or has those of several versions"
            raise self._broken("mismatch", rule, "download them all, into an empty folder")

    def _located(self, name: str) -> list[DataFile]:
        try:
            locations = self._locator.locate(self._place, f"{self._folder}/{name}")
        except NoFile:
            raise
        except SpecError as error:  # of the folder: what is in it is not for the user to name
            raise SpecError(replace(problem, value=self._folder) for problem in error.problems) from None
        return [DataFile(self._place, location) for location in locations]

    def _json(self, name: str) -> Mapping[str, Any] | None:
        """Object in a JSON file; None if there is no such file."""
        try:
            (file,) = self._located(name)
        except NoFile:
            return None
        try:
            with file.location.raw() as raw:
                content = raw.read(_MAX_JSON_BYTES + 1)
            value = json.loads(content) if len(content) <= _MAX_JSON_BYTES else None
        except DAMAGED as error:
            raise file.unreadable(error) from None
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise file.broken("corrupt", "is not a JSON object", "save the dataset again")
        return value


def locate_source(
    locator: Locator, place: str, spec: FilesFields, seen_locations: set[Location] | None = None
) -> tuple[Format | None, list[DataFile]]:
    """(format of a dataset, or None; files) of a source at `place`, in order, without repetition. Files in `seen` are
    omitted, and others added to it. Raises SpecError."""
    if spec.dataset is None:
        return None, locate_files(locator, f"{place}.paths", spec.paths or (), seen_locations)
    dataset = DatasetFolder(locator, f"{place}.dataset", spec.dataset).files(spec.split)
    seen_locations = set() if seen_locations is None else seen_locations
    files = [file for file in dataset.files if file.location not in seen_locations]
    seen_locations.update(file.location for file in files)
    return dataset.format, files
