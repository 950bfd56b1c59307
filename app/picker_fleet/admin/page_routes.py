"""The dashboard: the files of `admin/page/`, and what a browser may do with them."""

import base64
import hashlib
import re
from pathlib import Path

from fastapi import Depends, FastAPI, Response

from picker_fleet.admin.problems import Refused
from picker_fleet.admin.rate import Rate

_FOLDER = Path(__file__).parent / "page"
_INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
}
_INLINE = re.compile(rb"<(script|style)(?:\s[^>]*)?>(.*?)</\1>", re.DOTALL | re.IGNORECASE)


def policy(page: bytes) -> str:
    """The Content-Security-Policy of `page`: only this replica, and inline pieces by what they contain."""
    hashes: dict[bytes, list[str]] = {b"script": [], b"style": []}
    for kind, text in _INLINE.findall(page):
        if text.strip():
            digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
            hashes[kind.lower()].append(f"'sha256-{digest}'")
    return "; ".join(
        (
            "default-src 'none'",
            " ".join(("script-src 'self'", *hashes[b"script"])),
            " ".join(("style-src 'self'", *hashes[b"style"])),
            "img-src 'self' data:",
            "font-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def add(app: FastAPI, rate: Rate) -> None:
    """Serve the page at `/` and its files at `/static/NAME`; read once, when the replica starts.

    `rate` is asked before each call.
    """
    files = {
        file.name: file.read_bytes() for file in sorted(_FOLDER.iterdir()) if file.suffix in _TYPES
    } if _FOLDER.is_dir() else {}  # fmt: skip
    guarded = {
        "content-security-policy": policy(files.get(_INDEX, b"")),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    asked = [Depends(rate)]

    def found(name: str) -> Response:
        if name not in files:
            raise Refused(404, "unknown_file", "the dashboard has no such file")
        return Response(files[name], media_type=_TYPES[Path(name).suffix], headers=guarded)

    @app.get("/", response_class=Response, include_in_schema=False, dependencies=asked)
    async def index() -> Response:
        return found(_INDEX)

    @app.get("/static/{name}", response_class=Response, include_in_schema=False, dependencies=asked)
    async def static(name: str) -> Response:
        return found(name)
