"""Index of a checkpoint: its tensors, the file of each piece, and the seals of all files. The index is written last and
atomically: if it exists, the checkpoint is complete."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from moe.sharding.saved import tensor_file
from moe.spec import ProblemCode, SpecError, spec_error
from moe.storage.folder import Folder

FILE = "index.json"
_VERSION = 1
_PIECES = re.compile(r"part-\d{5}-of-\d{5}\.[0-9a-f]{8}\.safetensors")
_MAX_BYTES = 1 << 28


def piece_file(rank: int, num_ranks: int, save: str) -> str:
    """Name of a rank's file. Each save uses new names, so that the previous checkpoint stays complete."""
    return f"part-{rank:05d}-of-{num_ranks:05d}.{save}.safetensors"


def is_piece_file(name: str) -> bool:
    return _PIECES.fullmatch(name) is not None


@dataclass(frozen=True)
class SavedPiece:
    """A box of a tensor, in a file under a name."""

    file: str
    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    """Name of the dtype in safetensors."""
    pieces: tuple[SavedPiece, ...]


@dataclass(frozen=True)
class Seal:
    """Size and checksum of a file."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class OptimizerState:
    """State of an optimizer, by the module's names of parameters."""

    kind: str
    groups: tuple[dict[str, Any], ...]
    """`names` of parameters, and `options`, plain values."""
    state: dict[str, dict[str, dict[str, Any]]]
    """By parameter and slot: `{"tensor": name in the checkpoint}` or `{"plain": value}`."""


@dataclass(frozen=True)
class Index:
    """Contents of a checkpoint."""

    tensors: dict[str, SavedTensor]
    files: dict[str, Seal] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    """Name under which a tied tensor is stored, by its other names."""
    draws: dict[str, int] | None = None
    """Seed and step of random numbers; None for files of other tools."""
    optimizer: OptimizerState | None = None
    extra: Any = None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "version": _VERSION}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Index":
        """Raises ValueError, KeyError or TypeError for data that is not an index."""
        plain = dict(data)
        if plain.pop("version", None) != _VERSION:
            raise ValueError(f"the version must be {_VERSION}")
        return cls(
            **{
                **plain,
                "tensors": {
                    name: SavedTensor(
                        tuple(fields["shape"]),
                        fields["dtype"],
                        tuple(
                            SavedPiece(piece["file"], piece["name"], tuple(piece["offsets"]), tuple(piece["sizes"]))
                            for piece in fields["pieces"]
                        ),
                    )
                    for name, fields in plain["tensors"].items()
                },
                "files": {name: Seal(**fields) for name, fields in plain["files"].items()},
                "optimizer": plain["optimizer"] and OptimizerState(**plain["optimizer"]),
            }
        )


MODEL, OPTIMIZER = "model.", "optimizer."
"""Prefixes of names of tensors; in those of an optimizer the slot follows."""


def write(folder: Folder, index: Index) -> None:
    body = json.loads(json.dumps(index.to_json()))
    folder.write(FILE, json.dumps({**body, "sha256": _digest(body)}).encode())


def read(folder: Folder) -> Index:
    """The index of a folder. For a folder with only safetensors files of whole tensors, as other tools write them, an
    index of these. Raises SpecError for a checkpoint that is incomplete, altered or missing."""
    try:
        content = folder.read(FILE, max_bytes=_MAX_BYTES)
    except FileNotFoundError:
        return _index_of_plain_files(folder)
    try:
        body = json.loads(content)
        digest = body.pop("sha256")
        if digest != _digest(body):
            raise ValueError("its digest does not match")
        version = body["version"]
        index = Index.from_json(body) if version == _VERSION else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _corrupt_error(folder, f"has an invalid {FILE} ({error})") from None
    if index is None:
        rule = f"has an {FILE} of version {version}; this release reads version {_VERSION}"
        raise _error("wrong_version", folder, rule, "load it with the release that saved it")
    return index


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _index_of_plain_files(folder: Folder) -> Index:
    files = [name for name in folder.names() if name.endswith(".safetensors")]
    remedy = "use a folder in which sharding.save has finished"
    if any(map(is_piece_file, files)):
        rule = f"is an incomplete checkpoint without {FILE}"
        raise _error("not_found", folder, rule, remedy)
    if not files:
        rule = f"has neither {FILE} nor safetensors files"
        raise _error("not_found", folder, rule, remedy)
    tensors: dict[str, SavedTensor] = {}
    for file in files:
        try:
            entries = tensor_file.entries(folder, file)
        except ValueError as error:
            raise _corrupt_error(folder, f"cannot be read: {error}") from None
        for name, entry in entries.items():
            piece = SavedPiece(file, name, (0,) * len(entry.shape), entry.shape)
            tensors[MODEL + name] = SavedTensor(entry.shape, entry.dtype, (piece,))
    return Index(tensors)


def _corrupt_error(folder: Folder, rule: str) -> SpecError:
    return _error("corrupt", folder, rule, "use another checkpoint")


def _error(code: ProblemCode, folder: Folder, rule: str, remedy: str) -> SpecError:
    return spec_error(code, "checkpoint", folder.url, rule, remedy)
