"""A folder in the Hugging Face format, under the allowed roots: its small files, and the locations of its weights. No
torch."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from moe.data.locations import Location, Locator, NoFile
from moe.interchange.quantization import QuantizationFile
from moe.spec import spec_error

CONFIG, INDEX, SINGLE, SEALS = ("config.json", "model.safetensors.index.json", "model.safetensors", "shardyard.json")
QUANTIZATION = "hf_quant_config.json"
MAX_CONFIG_BYTES = 1 << 24
MAX_INDEX_BYTES = 1 << 28
MAX_FILES = 10_000
_SHARD = re.compile(r"[^/*\0\ud800-\udfff]+\.safetensors")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "*.bin", "*.pt", "*.pth", "*.ckpt")


def folder_of(url: str) -> str:
    """Folder of a URL that names the folder or its `config.json`."""
    folder, slash, name = url.rpartition("/")
    return (folder or slash or ".") if name == CONFIG else url


class HubFolder:
    """Files of a folder by name. `place` is the folder's path in errors; `roots` as in `Locator`."""

    def __init__(self, url: str, roots: Sequence[str] | None, place: str = "model.from") -> None:
        self.url, self.place = url.rstrip("/"), place
        if "*" in url:
            raise spec_error("invalid_value", place, url, "must name one folder, without *", "name the model's folder")
        self._locator = Locator(roots)

    def path(self, name: str) -> str:
        return self.url if name == CONFIG and self._is_config else f"{self.url}/{name}"

    @cached_property
    def _is_config(self) -> bool:
        """Whether the URL is a config file with another name, such as `qwen3-30b.json`, instead of a folder. Other
        files in its folder are not read, since they may belong to other models."""
        return self.url.endswith(".json") and (self._is_file(self.url) or not self._is_file(f"{self.url}/{CONFIG}"))

    def _is_file(self, path: str) -> bool:
        try:
            return bool(self._locator.locate(self.place, path))
        except NoFile:
            return False

    def find(self, name: str) -> Location:
        """Location of a file. Raises SpecError."""
        return self._locator.locate(self.place, self.path(name))[0]

    def has(self, name: str) -> bool:
        """Whether a file of this name, or any that matches this pattern, exists. Raises SpecError outside the roots."""
        return bool(self.glob(name))

    def glob(self, pattern: str) -> list[Location]:
        """Files that match a pattern; empty if none do. Raises SpecError outside the roots."""
        try:
            return self._locator.locate(self.place, self.path(pattern))
        except NoFile:
            return []

    def read(self, name: str, max_bytes: int) -> bytes:
        """Read a whole file. Raises SpecError if it is missing, or larger than `max_bytes`."""
        location = self.find(name)
        try:
            with location.raw() as file:
                content = file.read(max_bytes + 1)
        except OSError as error:
            raise spec_error("unreadable", self.place, self.path(name), f"cannot be read: {error}",
                             "check its permissions") from None  # fmt: skip
        if len(content) > max_bytes:
            raise spec_error("too_large", self.place, self.path(name), f"has more than {max_bytes:,} bytes",
                             "use the model's original file")  # fmt: skip
        return content

    def read_json(self, name: str, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
        """Read a JSON file with an object. Raises SpecError."""
        return self._object(name, self.read(name, max_bytes))

    def _object(self, name: str, content: bytes) -> dict[str, Any]:
        try:
            value = json.loads(content, parse_constant=_no_number)
            if not isinstance(value, dict):
                raise ValueError(f"expected an object, not {type(value).__name__}")
        except (ValueError, RecursionError) as error:
            raise spec_error(
                "invalid_syntax", self.place, self.path(name), f"is not valid JSON: {error}", "download the file again"
            ) from None
        return value

    def config(self, name: str = CONFIG) -> tuple[dict[str, Any], str]:
        """(content, digest) of `config.json` or another config. Raises SpecError."""
        content = self.read(name, MAX_CONFIG_BYTES)
        return self._object(name, content), hashlib.sha256(content).hexdigest()[:16]

    def quantization_file(self) -> QuantizationFile | None:
        """The file that describes quantized weights if `config.json` does not. Raises SpecError."""
        if self._is_config or not self.has(QUANTIZATION):
            return None
        return QuantizationFile(self.read_json(QUANTIZATION), self.path(QUANTIZATION))

    def weight_files(self) -> dict[str, Location]:
        """Weight files by name. Raises SpecError if there are none, or only pickles, which are never loaded."""
        if self.has(SINGLE):  # preferred to an index, as in transformers
            return {SINGLE: self.find(SINGLE)}
        if self.has(INDEX):
            names = sorted(set(self._read_index()))
            self._require_few(len(names))
            return {name: self.find(name) for name in names}
        files = {location.path.rpartition("/")[2]: location for location in self.glob("*.safetensors")}
        if not files:
            pickle = next((name for name in _PICKLES if self.has(name)), None)
            rule = "has no weights (*.safetensors)"
            remedy = "name a folder with a model's weights"
            if pickle is not None:
                rule += f", but pickles ({pickle}), which can run code and are never loaded"
                remedy = "if you trust them, convert them to safetensors"
            raise spec_error("not_found", self.place, self.url, rule, remedy)
        self._require_few(len(files))
        return files

    def _require_few(self, num_files: int) -> None:
        if num_files > MAX_FILES:
            rule = f"has weights in {num_files:,} files; the limit is {MAX_FILES:,}"
            raise spec_error("too_large", self.place, self.url, rule, "save it in larger shards")

    def _read_index(self) -> Iterator[str]:
        """Yield the file of each tensor in the index."""
        index = self.read_json(INDEX, MAX_INDEX_BYTES)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise spec_error("corrupt", self.place, self.path(INDEX), "has no weight_map", "download the file again")
        for tensor, name in weight_map.items():
            if not isinstance(name, str) or not _SHARD.fullmatch(name):
                raise spec_error("corrupt", self.place, self.path(INDEX),
                                 f"places {tensor!r} in {name!r}, which is not a .safetensors file of this folder",
                                 "download the file again")  # fmt: skip
            yield name


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")
