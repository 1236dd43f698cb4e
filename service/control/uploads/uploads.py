"""Uploads on the first storage root: received, listed, named by specs, removed.

All state is in the storage, so that any control plane continues where a killed one stopped. Only removals are recorded
in the database first, since the jobs that name uploads are stored there:

    .uploads/parts/SHA256-SIZE/     parts of files that are not complete
    .uploads/files/SHA256           complete files that no upload has yet
    .uploads/folders/DIGEST/NAME    files of uploads, which jobs read
    .uploads/manifests/DIGEST       names and hashes of an upload; written last, so that it is complete if this exists
    .uploads/drafts/DIGEST          notes that the folder is being made or removed
"""

import errno
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from time import monotonic

import structlog
from pydantic import BaseModel, ValidationError
from sqlalchemy import Connection

from moe.spec.errors import Problem, SpecError, spec_error
from moe.storage.folder import Folder
from service.control.errors import Conflict, Full, NotFound, Unavailable
from service.control.jobs.lease import Lease
from service.control.jobs.roots import StorageRoots
from service.control.store.clock import now_us
from service.control.store.database import Database
from service.control.store.jobs import find_job_with
from service.control.store.removed_uploads import (
    delete_removed_upload,
    insert_removed_upload,
    lock_uploads,
    removed_uploads,
)
from service.control.uploads.parts import Parts, WrongHash
from service.wire.states import ENDED, State
from service.wire.uploads import HASH, PREFIX, UploadSpec

_MANIFESTS, _FOLDERS, _DRAFTS = "manifests", "folders", "drafts"
_NUM_LOCKS = 64
_LOCK_S = 10.0
"""Longest wait for another request on the same file."""
_LOOK_S = 600.0
"""Interval of searches for abandoned parts."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
log = structlog.get_logger(__name__)


class Manifest(BaseModel):
    """Stored upload."""

    created_at_us: int
    spec: UploadSpec


@dataclass(frozen=True)
class Receipt:
    """Stored bytes of an upload's files."""

    digest: str
    offsets: dict[str, int]
    """Received bytes of incomplete files, by SHA-256."""

    @property
    def is_complete(self) -> bool:
        return not self.offsets


@dataclass(frozen=True)
class UploadLimits:
    max_bytes: int
    """Maximum number of bytes of one upload."""
    max_total_bytes: int
    """Maximum number of bytes of all uploads and parts together."""
    abandoned_after_s: float


class Uploads:
    """Uploads. Thread-safe; several control planes may share one storage root."""

    def __init__(self, database: Database, lease: Lease, roots: StorageRoots, limits: UploadLimits) -> None:
        self._database, self._lease, self._limits = database, lease, limits
        self._root, self._folder_url = roots.locations()[0], roots.uploads_url
        self._locks = [threading.Lock() for _ in range(_NUM_LOCKS)]
        self._naming_lock = threading.Lock()
        """Held while complete files are turned into an upload, or an upload is removed."""
        self._known: dict[str, Manifest] = {}
        self._look_at = 0.0

    @property
    def url(self) -> str:
        """Folder of the folders that jobs read."""
        return f"{self._folder_url}/{_FOLDERS}"

    def begin(self, spec: UploadSpec) -> Receipt:
        """Missing bytes of an upload, which is stored under its digest once it is complete. Raises SpecError for an
        upload that is too large, Full and Unavailable."""
        if spec.size_bytes > self._limits.max_bytes:
            rule = f"has {spec.size_bytes:,} bytes, more than the {self._limits.max_bytes:,} of one upload"
            raise spec_error(
                "too_large", "files", None, rule, "upload it in parts, or raise SHARDYARD_MAX_UPLOAD_BYTES"
            )
        digest = spec.digest
        with self._storage_errors():
            manifests = self._present_manifests()
            if digest in manifests:
                return Receipt(digest, {})
            sizes = {file.sha256: file.size_bytes for file in spec.files.values()}
            missing = sizes.keys() - self._complete(manifests)
            self._require_room({(sha256, sizes[sha256]) for sha256 in missing}, manifests)
            partial_files = self._parts.names()
            offsets = {}
            for sha256 in sorted(missing):
                key = (sha256, sizes[sha256])
                offset = self._parts.offset(*key) if key in partial_files else 0
                if offset < key[1]:
                    offsets[sha256] = offset
                else:  # received completely by a control plane that was then killed
                    with self._locked(sha256):
                        self._assemble(*key)
            if not offsets:
                self._name(digest, spec)
        return Receipt(digest, offsets)

    def append(self, sha256: str, size_bytes: int, offset: int, content: bytes) -> int:
        """Store a part of a file; returns the bytes received, all of them if the file is complete. Raises Conflict with
        the right offset for another, SpecError for content of another hash, Full, Unavailable."""
        with self._storage_errors(), self._locked(sha256):
            manifests = self._present_manifests()
            if sha256 in self._complete(manifests):
                return size_bytes
            num_received = self._parts.offset(sha256, size_bytes)
            if offset != num_received:
                rule = f"is not where the file goes on: {num_received} bytes were received"
                problem = Problem("invalid_value", "Upload-Offset", offset, rule, f"go on at byte {num_received}")
                raise Conflict(str(problem), problem, headers={"upload-offset": str(num_received)})
            if offset + len(content) > size_bytes:
                rule = f"goes beyond the {size_bytes} bytes of the file, from byte {offset} on"
                raise spec_error("too_large", "body", len(content), rule, "send the file's own bytes")
            if offset == 0:
                if size_bytes > self._limits.max_bytes:
                    rule = f"is more than the {self._limits.max_bytes:,} bytes of one upload"
                    raise spec_error("too_large", "Upload-Length", size_bytes, rule, "upload smaller files")
                self._require_room({(sha256, size_bytes)}, manifests)
            if content:
                self._parts.append(sha256, size_bytes, offset, content)
            if offset + len(content) == size_bytes:
                self._assemble(sha256, size_bytes)
            return offset + len(content)

    def list_all(self) -> list[tuple[str, Manifest]]:
        """(digest, manifest) of the complete uploads, newest first."""
        with self._storage_errors():
            return sorted(self._present_manifests().items(), key=lambda item: (-item[1].created_at_us, item[0]))

    def find(self, digest: str) -> Manifest:
        """Raises NotFound."""
        with self._storage_errors():
            manifest = self._present_manifests().get(digest)
        if manifest is None:
            raise NotFound(f"there is no upload {digest[:100]!r}; 'shardyard uploads ls' lists them")
        return manifest

    def remove(self, digest: str) -> Manifest:
        """Remove an upload. Raises NotFound, Conflict while a job that has not ended names it."""
        manifest = self.find(digest)
        # Committed before its files are removed: from then on `require_present` refuses jobs that name it.
        with self._database.write() as tx:
            lock_uploads(tx)
            if (job_id := find_job_with(tx, f"{self.url}/{digest}/", set(State) - ENDED)) is not None:
                raise Conflict(f"{job_id} reads the upload and has not ended; wait for it, or cancel it first")
            insert_removed_upload(tx, digest, now_us())
        with self._storage_errors(), self._naming_lock:
            if digest in self._manifests():  # not removed by another request meanwhile
                self._remove_files(digest)
        return manifest

    def require_present(self, tx: Connection, spec_text: str) -> None:
        """Exclude removals until the transaction that stores a job of this spec ends. Raises Conflict if it names an
        upload that was removed since the spec was checked."""
        digests = set(re.findall(rf"{re.escape(self.url)}/({HASH.pattern})/", spec_text))
        if not digests:
            return
        lock_uploads(tx)
        for digest in sorted(digests & removed_uploads(tx).keys()):
            rule, remedy = "was removed at this moment", "upload the files again with 'shardyard upload PATH'"
            problem = Problem("not_found", "data", url_of(digest), rule, remedy)
            raise Conflict(str(problem), problem)

    def manifests(self) -> dict[str, Manifest]:
        """Complete uploads by digest. Raises Unavailable."""
        with self._storage_errors():
            return self._present_manifests()

    def step(self) -> bool:
        """Remove abandoned files, parts and drafts, if a search for them is due. Returns False."""
        if monotonic() < self._look_at or not self._lease.is_held:
            return False
        self._look_at = monotonic() + min(_LOOK_S, self._limits.abandoned_after_s)
        before = datetime.now(UTC) - timedelta(seconds=self._limits.abandoned_after_s)
        try:
            for name in self._parts.remove_abandoned(before):
                log.info("removed what was uploaded of a file and abandoned", file=name)
            with self._naming_lock:
                manifests = self._end_removals(before)
                for digest in self._folder.names(_DRAFTS):
                    if digest in manifests:
                        self._folder.remove(f"{_DRAFTS}/{digest}")
                    elif self._folder.modified(f"{_DRAFTS}/{digest}") < before:
                        self._remove_draft(digest)
        except Exception as error:  # from any storage backend
            log.warning("cannot remove abandoned uploads", error=str(error))
        return False

    @cached_property
    def _folder(self) -> Folder:
        return Folder(self._folder_url, root=self._root)

    @cached_property
    def _parts(self) -> Parts:
        return Parts(self._folder)

    def _assemble(self, sha256: str, size_bytes: int) -> None:
        try:
            self._parts.assemble(sha256, size_bytes)
        except WrongHash as error:
            rule = f"is not the SHA-256 of the content, which is {error}"
            remedy = "upload it again, from byte 0, while nothing changes the file"
            raise spec_error("invalid_value", "sha256", sha256, rule, remedy) from None

    def _name(self, digest: str, spec: UploadSpec) -> None:
        """Give complete files their names in an upload."""
        with self._naming_lock:
            manifests = self._manifests()
            if digest in manifests:
                if digest in self._present_manifests():
                    return
                self._remove_files(digest)  # of a removal that a killed control plane has begun
                manifests = self._manifests()
            paths_in_uploads = {
                file.sha256: f"{_FOLDERS}/{other}/{name}"
                for other, manifest in manifests.items()
                for name, file in manifest.spec.files.items()
            }
            self._folder.write(f"{_DRAFTS}/{digest}", b"")
            for name, file in spec.files.items():
                source = paths_in_uploads.get(file.sha256) or self._parts.file_path(file.sha256)
                self._folder.copy(source, f"{_FOLDERS}/{digest}/{name}")
            manifest = Manifest(created_at_us=now_us(), spec=spec)
            self._folder.write(f"{_MANIFESTS}/{digest}", manifest.model_dump_json().encode())
            self._folder.remove(f"{_DRAFTS}/{digest}")
            with self._database.write() as tx:
                delete_removed_upload(tx, digest)
            for file in spec.files.values():
                self._parts.remove_complete(file.sha256)
        log.info("stored an upload", digest=digest, num_files=len(spec.files), num_bytes=spec.size_bytes)

    def _remove_files(self, digest: str) -> None:
        """Remove an upload, its manifest first."""
        self._folder.write(f"{_DRAFTS}/{digest}", b"")
        self._folder.remove(f"{_MANIFESTS}/{digest}")
        self._remove_draft(digest)
        log.info("removed an upload", digest=digest)

    def _end_removals(self, before: datetime) -> dict[str, Manifest]:
        """Complete removals that a killed control plane began, and forget removals so old that no request in progress
        can have missed them; return the remaining manifests."""
        present = self._present_manifests()
        for digest in self._manifests().keys() - present.keys():
            self._remove_files(digest)
        with self._database.write() as tx:
            for digest, removed_at in removed_uploads(tx).items():
                if digest in present or removed_at < before.timestamp() * 1e6:
                    delete_removed_upload(tx, digest)
        return present

    def _present_manifests(self) -> dict[str, Manifest]:
        """Manifests of the uploads that are not being removed."""
        manifests = self._manifests()
        with self._database.read() as tx:
            removal_times = removed_uploads(tx)
        return {digest: manifest for digest, manifest in manifests.items()
                if removal_times.get(digest, -1) < manifest.created_at_us}  # fmt: skip

    def _remove_draft(self, digest: str) -> None:
        self._folder.remove(f"{_FOLDERS}/{digest}")
        self._folder.remove(f"{_DRAFTS}/{digest}")

    def _manifests(self) -> dict[str, Manifest]:
        """Manifests in the storage. They never change, so a manifest is read once."""
        digests = [name for name in self._folder.names(_MANIFESTS) if HASH.fullmatch(name)]
        known = {digest: self._known[digest] for digest in digests if digest in self._known}
        for digest in digests:
            if digest not in known:
                try:
                    known[digest] = Manifest.model_validate_json(self._folder.read(f"{_MANIFESTS}/{digest}"))
                except FileNotFoundError:
                    continue  # removed meanwhile
                except ValidationError:
                    log.warning("the manifest of an upload is damaged; it is ignored", digest=digest)
        self._known = known
        return known

    def _complete(self, manifests: dict[str, Manifest]) -> set[str]:
        """SHA-256 of all complete files."""
        hashes_in_uploads = {file.sha256 for manifest in manifests.values() for file in manifest.spec.files.values()}
        return hashes_in_uploads | self._parts.complete()

    def _require_room(self, new_files: set[tuple[str, int]], manifests: dict[str, Manifest]) -> None:
        """Raises Full if the files would make all uploads together too large. Parts count with their whole file."""
        files = {(file.sha256, file.size_bytes) for manifest in manifests.values()
                 for file in manifest.spec.files.values()}  # fmt: skip
        total_bytes = sum(size_bytes for _, size_bytes in files | self._parts.names().keys() | new_files)
        if new_files and total_bytes > self._limits.max_total_bytes:
            raise Full(
                f"all uploads together would take {total_bytes:,} bytes, more than the "
                f"{self._limits.max_total_bytes:,} of SHARDYARD_MAX_UPLOADS_BYTES; remove some with "
                "'shardyard uploads rm DIGEST'"
            )

    @contextmanager
    def _locked(self, sha256: str) -> Iterator[None]:
        lock = self._locks[int(sha256[:8], 16) % _NUM_LOCKS]
        if not lock.acquire(timeout=_LOCK_S):
            raise Unavailable(
                "another request is storing this file; ask again in some seconds", headers={"retry-after": "5"}
            )
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except (SpecError, Conflict):
            raise
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise Full(f"the storage of uploads is full: {error}; make room, and repeat the request") from None
            raise Unavailable(f"cannot use the storage of uploads: {error}") from None


def url_of(digest: str) -> str:
    """Prefix of the names of an upload's files in specs."""
    return f"{PREFIX}{digest}"
