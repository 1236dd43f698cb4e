"""`/static`: styles, modules and the chart library, cached by browsers for as long as they do not change."""

import gzip
import mimetypes
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".yaml": "text/plain",
    "": "text/plain",
}
_FOREVER = "public, max-age=31536000, immutable"
_CHECKED = "no-cache"
"""The browser asks again each time, with the ETag."""


@dataclass(frozen=True)
class StaticFile:
    content: bytes
    compressed: bytes
    media_type: str
    etag: str


class StaticFiles:
    """All files of a folder, in memory. A hash of all of them is part of their URLs, so that modules that import each
    other by relative paths are of one release."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {
            path.relative_to(folder).as_posix(): _read(path) for path in sorted(folder.rglob("*")) if path.is_file()
        }
        digest = sha256()
        for name, file in self._files.items():
            digest.update(f"{name}\0{file.etag}\0".encode())
        self.release = digest.hexdigest()[:12]

    @property
    def names(self) -> Iterable[str]:
        """Paths of all files below the folder."""
        return self._files

    def url(self, name: str) -> str:
        """URL of a file. Raises KeyError without one: a page never links to nothing."""
        self._files[name]
        return f"/static/{self.release}/{name}"

    def route(self) -> Route:
        return Route("/static/{release}/{name:path}", self._respond, methods=["GET"])

    async def _respond(self, request: Request) -> Response:
        file = self._files.get(request.path_params["name"])
        if file is None:
            return Response("there is no such file\n", 404, media_type="text/plain")
        # A page of another release, during an update of several replicas, gets this one's file for now only.
        is_current = request.path_params["release"] == self.release
        headers = {"cache-control": _FOREVER if is_current else _CHECKED, "etag": file.etag, "vary": "accept-encoding"}
        if file.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        takes_gzip = "gzip" in request.headers.get("accept-encoding", "")
        if takes_gzip:
            headers["content-encoding"] = "gzip"
        return Response(file.compressed if takes_gzip else file.content, media_type=file.media_type, headers=headers)


def _read(path: Path) -> StaticFile:
    content = path.read_bytes()
    media_type = _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return StaticFile(content, gzip.compress(content, mtime=0), media_type, f'"{sha256(content).hexdigest()[:16]}"')
