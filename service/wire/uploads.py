"""Uploads as client and control plane see them: files by name, and the digest that identifies them."""

import hashlib
import json
import re
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, field_validator

PREFIX = "upload://"
MAX_PART_BYTES = 16 << 20
"""Most bytes of one request that appends to a file."""
MAX_FILES = 4_000
MAX_DEPTH = 8
MAX_NAME_BYTES = 200
"""Length of one part of a name; file systems allow 255 bytes."""
HASH = re.compile(r"[0-9a-f]{64}")
_ODD = re.compile(r"[\\?#*\[\]%:]")


class UploadFile(BaseModel):
    """Content of a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str = Field(pattern=f"^{HASH.pattern}$")
    size_bytes: int = Field(ge=0, le=1 << 60)


class UploadSpec(BaseModel):
    """Files of an upload by name: `/`-separated paths, below a folder that the service chooses."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    files: Mapping[str, UploadFile] = Field(min_length=1, max_length=MAX_FILES)

    @field_validator("files")
    @classmethod
    def _have_plain_names(cls, files: Mapping[str, UploadFile]) -> Mapping[str, UploadFile]:
        for name in files:
            if fault := name_fault(name):
                raise ValueError(f"has the name {name[:200]!r}, which {fault}; rename the file")
            parts = name.split("/")
            for depth in range(1, len(parts)):
                if (parent := "/".join(parts[:depth])) in files:
                    raise ValueError(f"has {parent!r} both as a file and as a folder; rename one")
        return files

    @property
    def digest(self) -> str:
        """SHA-256 of the files' names and contents."""
        content = {name: [file.sha256, file.size_bytes] for name, file in self.files.items()}
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())


def name_fault(name: str) -> str | None:
    """Rule that a file's name breaks; None for a plain one."""
    parts = name.split("/")
    if len(parts) > MAX_DEPTH:
        return f"is more than {MAX_DEPTH} folders deep"
    if any(part in ("", ".", "..") for part in parts):
        return "is not a path below a folder"
    if any(part.startswith(".") for part in parts):
        return "has a part that starts with a dot"
    if any(len(part.encode(errors="replace")) > MAX_NAME_BYTES for part in parts):
        return f"has a part of more than {MAX_NAME_BYTES} bytes"
    if _ODD.search(name) or not name.isprintable():
        return "contains one of \\ ? # * [ ] % : or an invisible character"
    return None
