"""Uploads to a control plane: hashed here, sent in parts, resumed after interruptions."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from service.client.connection import ServiceConnection
from service.client.errors import ApiError, ClientError, Unreachable
from service.client.stream import Patience
from service.wire.uploads import MAX_FILES, MAX_PART_BYTES, name_fault

STORE_TIMEOUT_S = 3600.0
"""Longest wait for a response: after a file's last part, the service verifies the hash of the whole file."""
_HASH_BLOCK_BYTES = 1 << 20
_MAX_REHASHES = 3
"""Refusals of files that changed while they were sent, after which to give up."""


@dataclass(frozen=True)
class UploadProgress:
    """Progress of one phase: hashing, or sending."""

    phase: str
    done_bytes: int
    total_bytes: int


OnProgress = Callable[[UploadProgress], None]


class Uploads:
    """Sends, lists and removes uploads. An upload is named by its digest or its `upload://` URL."""

    def __init__(self, connection: ServiceConnection, patience: Patience) -> None:
        self._connection, self._patience = connection, patience

    def send(self, path: str | Path, on_progress: OnProgress = lambda _: None) -> dict[str, Any]:
        """Upload a file, or a folder with everything below it except hidden files. Content that the service already
        has is not sent again, so a repeated call resumes. Raises ClientError."""
        files = local_files(Path(path))
        upload = _Sender(self._connection, self._patience, files, on_progress).send()
        return {**upload, "files": sorted(files)}

    def list(self) -> list[dict[str, Any]]:
        return list(self._connection.get("/v1/uploads")["items"])

    def show(self, upload: str) -> dict[str, Any]:
        """An upload with its files. Raises ApiError (404)."""
        return dict(self._connection.get(_path(upload)))

    def remove(self, upload: str) -> dict[str, Any]:
        """Remove an upload. Raises ApiError (404), and (409) while a job that has not ended names it."""
        return dict(self._connection.delete(_path(upload)))


def local_files(path: Path) -> dict[str, Path]:
    """Local files by their names in the upload. Raises ClientError if there are none, for names that an upload cannot
    have, and for anything but regular files (links to files are followed, links to folders are not)."""
    if path.is_dir():
        names = {file: file.relative_to(path) for file in sorted(path.rglob("*"))}
        files = {
            name.as_posix(): file
            for file, name in names.items()
            if not any(part.startswith(".") for part in name.parts) and (file.is_symlink() or not file.is_dir())
        }
    else:
        files = {path.name: path}
    if not files:
        raise ClientError(f"{path} has no files to upload; hidden ones are left out")
    if len(files) > MAX_FILES:
        raise ClientError(f"{path} has {len(files):,} files; an upload has at most {MAX_FILES:,}: join them, or upload "
                          "its folders one by one")  # fmt: skip
    for name, file in files.items():
        if fault := name_fault(name):
            raise ClientError(f"{str(file)!r} {fault}; rename it")
        if not file.exists():
            raise FileNotFoundError(2, "No such file or directory", str(file))
        if file.is_dir():
            raise ClientError(f"{file} is a link to a folder; replace it by the folder, or upload that by itself")
        if not file.is_file():
            raise ClientError(f"{file} is not a regular file; upload files and folders of files")
    return files


class _Sender:
    """Sends one upload, reconnecting as often as needed."""

    def __init__(
        self, connection: ServiceConnection, patience: Patience, files: dict[str, Path], on_progress: OnProgress
    ) -> None:
        self._connection, self._patience, self._files, self._on_progress = connection, patience, files, on_progress
        self._lost_at_s: float | None = None
        self._pause_s = patience.first_pause_s

    def send(self) -> dict[str, Any]:
        num_changed = 0
        self._hash()
        while True:
            receipt = self._persist(lambda: self._connection.post("/v1/uploads", self._body, timeout_s=STORE_TIMEOUT_S))
            self._show(receipt["offsets"])
            if receipt["complete"]:
                return {"digest": receipt["digest"], "url": receipt["url"], "size_bytes": self._total_bytes}
            for sha256, offset in receipt["offsets"].items():
                try:
                    self._send_file(sha256, offset, receipt)
                except ApiError as error:
                    if error.status != 422 or (num_changed := num_changed + 1) >= _MAX_REHASHES:
                        raise
                    self._hash()  # the file was changed meanwhile
                    break

    def _hash(self) -> None:
        sizes = {name: path.stat().st_size for name, path in self._files.items()}
        total_bytes, done_bytes = sum(sizes.values()), 0
        files: dict[str, dict[str, Any]] = {}
        for name, path in self._files.items():
            digest = hashlib.sha256()
            num_bytes = 0
            with path.open("rb") as file:
                while block := file.read(_HASH_BLOCK_BYTES):
                    digest.update(block)
                    num_bytes += len(block)
                    self._on_progress(UploadProgress("hashing", min(done_bytes + num_bytes, total_bytes), total_bytes))
            done_bytes += num_bytes
            files[name] = {"sha256": digest.hexdigest(), "size_bytes": num_bytes}
        self._body = {"files": files}
        self._by_hash = {file["sha256"]: (self._files[name], file["size_bytes"]) for name, file in files.items()}
        self._total_bytes = sum(size_bytes for _, size_bytes in self._by_hash.values())

    def _send_part(self, sha256: str, content: bytes, offset: int, size_bytes: int) -> dict[str, Any]:
        headers = {"upload-offset": str(offset), "upload-length": str(size_bytes)}
        path = f"/v1/uploads/files/{sha256}"
        return dict(self._persist(lambda: self._connection.patch(path, content, STORE_TIMEOUT_S, headers)))

    def _send_file(self, sha256: str, offset: int, receipt: dict[str, Any]) -> None:
        """Send the rest of a file; returns early if another client is sending it."""
        path, size_bytes = self._by_hash[sha256]
        part_bytes = min(MAX_PART_BYTES, int(receipt["max_part_bytes"]))
        with path.open("rb") as file:
            while True:
                file.seek(offset)
                content = file.read(min(part_bytes, size_bytes - offset))
                if len(content) < min(part_bytes, size_bytes - offset):
                    raise ClientError(f"{path} became shorter while it was sent; upload it again")
                try:
                    answer = self._send_part(sha256, content, offset, size_bytes)
                except ApiError as error:
                    if error.status == 409:  # another client, or a part whose answer was lost
                        return
                    raise
                offset = int(answer["offset"])
                receipt["offsets"][sha256] = offset
                self._show(receipt["offsets"])
                if answer["complete"]:
                    return

    def _show(self, offsets: dict[str, int]) -> None:
        missing_bytes = sum(self._by_hash[sha256][1] - offset for sha256, offset in offsets.items())
        self._on_progress(UploadProgress("sending", self._total_bytes - missing_bytes, self._total_bytes))

    def _persist(self, request: Callable[[], Any]) -> Any:
        """Make a request, and repeat it while the service is unavailable and the patience lasts."""
        while True:
            try:
                answer = request()
            except (Unreachable, ApiError) as error:
                if isinstance(error, ApiError) and error.status != 503:
                    raise
                now_s = time.monotonic()
                self._lost_at_s = now_s if self._lost_at_s is None else self._lost_at_s
                if now_s - self._lost_at_s >= self._patience.away_s:
                    raise
                time.sleep(self._pause_s)
                self._pause_s = min(2 * self._pause_s, self._patience.longest_pause_s)
            else:
                self._lost_at_s, self._pause_s = None, self._patience.first_pause_s
                return answer


def _path(upload: str) -> str:
    return f"/v1/uploads/{quote(upload.removeprefix('upload://').split('/')[0], safe='')}"
