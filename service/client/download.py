"""Downloads a job's files; complete files get their final name."""

import hashlib
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

from moe.train.checkpoint.marker import SUFFIX, FileSeal, Marker, order
from service.client.connection import ServiceConnection
from service.client.errors import ApiError, ClientError, Unreachable
from service.client.stream import Patience

SILENCE_S = 60.0
BLOCK_BYTES = 1 << 20


@dataclass
class Download:
    """Result of a download."""

    folder: Path
    fetched: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    """Complete files from an earlier download."""
    gone: list[str] = field(default_factory=list)
    """Checkpoints that the job removed meanwhile, as its spec asks."""
    num_bytes: int = 0
    """Total size of all these files."""


class Downloader:
    """Downloads a job's files. The next call continues interrupted files."""

    def __init__(
        self,
        connection: ServiceConnection,
        job_path: str,
        folder: Path,
        on_file: Callable[[str], None] | None = None,
        patience: Patience = Patience(away_s=0.0),
    ) -> None:
        """`patience`: for how long a broken connection is tried again within a call."""
        self._connection, self._job_path, self._patience = connection, job_path, patience
        self._on_file = on_file or (lambda path: None)
        self.result = Download(folder)

    def fetch_all(self, kinds: Collection[str] | None = None, latest: bool = False) -> Download:
        """Download files of these kinds; with `latest`, only the newest checkpoint. Raises ClientError, also for a
        file that does not match its checkpoint's marker."""
        files = self._list(kinds)
        markers = [path for path in files if path.startswith("checkpoints/") and path.endswith(SUFFIX)]
        for path in files:
            if not path.startswith("checkpoints/"):
                self._fetch(path, int(files[path]["size_bytes"]), None)
        newest_first = sorted(markers, key=lambda path: order(_checkpoint(path)) or (), reverse=True)
        for marker in newest_first[: 1 if latest else None]:
            self._fetch_checkpoint(marker, files[marker])
        return self.result

    def _list(self, kinds: Collection[str] | None) -> dict[str, dict[str, Any]]:
        files, cursor = dict[str, dict[str, Any]](), None
        while True:
            page = self._connection.get(
                f"{self._job_path}/files", kind=sorted(kinds or ()) or None, limit=10_000, cursor=cursor
            )
            files |= {str(item["path"]): item for item in page["items"]}
            cursor = page.get("next_cursor")
            if not cursor:
                return files

    def _fetch_checkpoint(self, path: str, entry: dict[str, Any]) -> None:
        """Download a checkpoint; its marker gets its final name last."""
        seal = FileSeal(size_bytes=int(entry["size_bytes"]), sha256=str(entry["sha256"]))
        target = self._target(path)
        is_present = target.is_file() and _sha256(target) == seal.sha256
        try:
            draft = target if is_present else self._fetch_draft(path, seal.size_bytes, seal)
            try:
                marker = Marker.from_bytes(draft.read_bytes())
            except ValueError as error:
                raise ClientError(f"{path}: {error}") from None
            for inner, its_seal in marker.files.items():
                self._fetch(f"checkpoints/{marker.name}/{inner}", its_seal.size_bytes, its_seal)
        except ApiError as error:
            if error.status != 404:
                raise
            self.result.gone.append(_checkpoint(path))
            return
        if is_present:
            self._keep(path, seal.size_bytes)
        else:
            self._place(path, draft, seal.size_bytes)

    def _fetch(self, path: str, size_bytes: int, seal: FileSeal | None) -> None:
        target = self._target(path)
        is_complete = target.is_file() and target.stat().st_size == size_bytes
        if is_complete and (seal is None or _sha256(target) == seal.sha256):
            return self._keep(path, size_bytes)
        return self._place(path, self._fetch_draft(path, size_bytes, seal), size_bytes)

    def _fetch_draft(self, path: str, size_bytes: int, seal: FileSeal | None) -> Path:
        """Download the complete file under a temporary name."""
        target = self._target(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.part")
        with open(os.open(draft, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b") as file:
            start = file.seek(0, os.SEEK_END)
            if start > size_bytes:
                start = file.seek(file.truncate(0))
            if start < size_bytes or not size_bytes:
                self._receive(file, path, size_bytes, _version_file(target))
            file.flush()
            os.fsync(file.fileno())
            found_bytes = file.seek(0, os.SEEK_END)
        if found_bytes != size_bytes:
            draft.unlink()
            raise ClientError(f"received {found_bytes:,} instead of {size_bytes:,} bytes of {path}; download it again")
        if seal is not None and _sha256(draft) != seal.sha256:
            draft.unlink()
            raise ClientError(f"the checksum of {path} is wrong; download it again")
        return draft

    def _receive(self, file: IO[bytes], path: str, size_bytes: int, version_file: Path) -> None:
        """Append the rest of a file, over as many connections as it takes. Raises Unreachable when none was possible
        for the time of the patience."""
        lost_at_s, pause_s = None, self._patience.first_pause_s
        while True:
            start = file.seek(0, os.SEEK_END)
            try:
                return self._append(file, path, start, size_bytes, version_file)
            except Unreachable:
                now_s = time.monotonic()
                if file.seek(0, os.SEEK_END) > start:
                    lost_at_s, pause_s = now_s, self._patience.first_pause_s
                lost_at_s = now_s if lost_at_s is None else lost_at_s
                if now_s - lost_at_s >= self._patience.away_s:
                    raise
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, self._patience.longest_pause_s)

    def _append(self, file: IO[bytes], path: str, start: int, size_bytes: int, version_file: Path) -> None:
        """Append what one connection brings; from the beginning, if the file has changed since its first part came."""
        version = version_file.read_text() if start and version_file.is_file() else None
        with self._connection.download(f"{self._job_path}/files/{path}", start, SILENCE_S, version) as part:
            file.seek(file.truncate(part.offset))
            if part.version is not None and part.version != version:
                version_file.write_text(part.version)
            for chunk in part.chunks:
                if file.tell() <= size_bytes:
                    file.write(chunk)

    def _keep(self, path: str, size_bytes: int) -> None:
        self.result.kept.append(path)
        self.result.num_bytes += size_bytes

    def _place(self, path: str, draft: Path, size_bytes: int) -> None:
        os.replace(draft, self._target(path))
        _version_file(self._target(path)).unlink(missing_ok=True)
        self.result.fetched.append(path)
        self.result.num_bytes += size_bytes
        self._on_file(path)

    def _target(self, path: str) -> Path:
        """Local path of a file, always below the folder. Raises ClientError."""
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or any(part in ("..", ".") or "\\" in part for part in parts):
            raise ClientError(f"the control plane sent {path!r}, which is not a path below a job's folder")
        return self.result.folder.joinpath(*parts)


def _version_file(target: Path) -> Path:
    """File with the version of which the first part of `target` is."""
    return target.with_name(f".{target.name}.version.part")


def _checkpoint(marker: str) -> str:
    """Name of the checkpoint with the marker at this path."""
    return marker.removeprefix("checkpoints/").removesuffix(SUFFIX)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
