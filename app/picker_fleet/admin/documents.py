"""The files and texts of the admin port: the dashboard's files, the metrics, and the description of the API
as OpenAPI document and HTML page. `api.create` adds the routes.
"""

import asyncio
import base64
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI, Response
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from picker_fleet.admin import examples
from picker_fleet.admin.protection import Refused
from picker_fleet.telemetry.metrics import Metrics

FOLDER = Path(__file__).parent / "page"
METRICS_INTERVAL_S = 1.0  # shortest time between two renderings of the metrics
MAX_METRICS_READS = 8  # an address may read one rendering so often, then waits for the next
MAX_METRICS_AGE_S = 4.0
_METRICS_LOAD = 0.05  # fraction of the event loop's time for rendering; more if the text gets too old
_INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_INLINE = re.compile(rb"<(script|style)(?:\s[^>]*)?>(.*?)</\1>", re.DOTALL | re.IGNORECASE)


class MetricsText:
    """The Prometheus text of a replica: metrics of the process and of its `pools`, rendered at most once a
    second and shared by all readers.

    All pools have the same families; with several pools each series has the label `pool`. Rendering yields to
    the event loop every `slice_s` seconds, so that decisions are not delayed. `clock` returns seconds.
    """

    def __init__(
        self, pools: Sequence[Metrics], clock: Callable[[], float] = time.monotonic, slice_s: float = 0.001
    ) -> None:
        self._pools = pools
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self._clock = clock
        self._slice_s = slice_s
        self._text = b""
        self._good_until_s = float("-inf")
        self._reads = Counter[str]()
        self._rendering: asyncio.Task[None] | None = None

    def pieces(self) -> Iterator[bytes]:
        """Yields the metrics text in pieces; rendering a piece takes microseconds. A series that changes
        during the rendering shows its old or its new value."""
        yield generate_latest(self._process)
        for same in zip(*(metrics.page.families for metrics in self._pools), strict=True):
            yield same[0].head
            for family in same:
                yield from family.series()

    async def read(self, address: str) -> bytes:
        """The metrics text; a new one if the last is too old or `address` read it MAX_METRICS_READS times.

        Raises:
            Refused: status 429, because too many readers at `address` wait for the next text.
        """
        if self._reads[address] >= MAX_METRICS_READS or self._clock() >= self._good_until_s:
            if self._rendering is None:
                self._rendering = asyncio.create_task(self._render(), name="metrics-text")
            await asyncio.shield(self._rendering)
            if self._reads[address] >= MAX_METRICS_READS:
                detail = (
                    f"one address may read a page {MAX_METRICS_READS} times; a new page comes in a second"
                )
                raise Refused(429, "too_many_calls", detail, retry_after_s=1)
        self._reads[address] += 1
        return self._text

    async def _render(self) -> None:
        try:
            await asyncio.sleep(self._good_until_s - self._clock())
            took_s, pieces = 0.0, []
            started_s = self._clock()
            for piece in self.pieces():
                pieces.append(piece)
                if (slice_s := self._clock() - started_s) >= self._slice_s:
                    took_s += slice_s
                    await asyncio.sleep(0)
                    started_s = self._clock()
            took_s += self._clock() - started_s
            self._text = b"".join(pieces)
            self._reads.clear()
            good_s = min(max(METRICS_INTERVAL_S, took_s / _METRICS_LOAD), MAX_METRICS_AGE_S)
            self._good_until_s = self._clock() + good_s
        finally:
            self._rendering = None


def content_security_policy(page: bytes) -> str:
    """The Content-Security-Policy of an HTML page: files from this replica only, and the page's own inline
    scripts and styles, listed by hash."""
    hashes: dict[bytes, list[str]] = {b"script": [], b"style": []}
    for kind, text in _INLINE.findall(page):
        if text.strip():
            digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
            hashes[kind.lower()].append(f"'sha256-{digest}'")
    scripts, styles = (" ".join(("'self'", *hashes[kind])) for kind in (b"script", b"style"))
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src 'self' data:; "
        "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def add_dashboard(app: FastAPI) -> None:
    """Serve the dashboard at `/` and its files at `/static/NAME`; the files are read once, at startup."""
    files = {file.name: file.read_bytes() for file in FOLDER.iterdir() if file.suffix in _TYPES}
    policy = content_security_policy(files[_INDEX])
    headers = {"content-security-policy": policy, "cache-control": "no-cache"}

    @app.get("/", response_class=Response, include_in_schema=False)
    async def index() -> Response:
        return await static(_INDEX)

    @app.get("/static/{name}", response_class=Response, include_in_schema=False)
    async def static(name: str) -> Response:
        if name not in files:
            raise Refused(404, "unknown_file", "the dashboard has no such file")
        return Response(files[name], media_type=_TYPES[Path(name).suffix], headers=headers)


def add_api_description(app: FastAPI) -> None:
    """Serve the OpenAPI document at `/openapi.json`, and as a self-contained HTML page at `/docs`. The first
    call to `/openapi.json` or `/docs` generates both documents."""
    examples.add(app)
    written: list[tuple[bytes, bytes]] = []

    async def texts() -> tuple[bytes, bytes]:
        if not written:
            # Generate the OpenAPI document in a thread: describing all models takes 0.1 s.
            written.append(await asyncio.to_thread(_describe, app))
        return written[0]

    @app.get("/openapi.json", response_class=Response, include_in_schema=False)
    async def document() -> Response:
        return Response((await texts())[0], media_type="application/json")

    @app.get("/docs", response_class=Response, include_in_schema=False)
    async def docs() -> Response:
        page = (await texts())[1]
        headers = {"content-security-policy": content_security_policy(page)}
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)


def _describe(app: FastAPI) -> tuple[bytes, bytes]:
    document = app.openapi()
    return orjson.dumps(document), _html(document).encode()


# HTML page that shows the OpenAPI document

_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem 1.25rem; font: 15px/1.5 system-ui, sans-serif; }
h2 { border-bottom: 1px solid #8886; text-transform: capitalize; }
details { margin: 0.4rem 0; } details details { margin-left: 1rem; }
summary { cursor: pointer; overflow-wrap: anywhere; } summary code { font-weight: 600; }
pre { overflow-x: auto; background: #8881; padding: 0.6rem; margin: 0.3rem 0 0.3rem 1rem; }
table { border-collapse: collapse; margin: 0.4rem 1rem; }
td, th { text-align: left; padding: 0.1rem 1rem 0.1rem 0; }
"""


def _html(document: dict[str, Any]) -> str:
    info, groups = document["info"], dict[str, list[str]]()
    for path, calls in document["paths"].items():
        for method, call in calls.items():
            groups.setdefault(call["tags"][0], []).append(_call_html(document, method, path, call))
    body = "".join(f"<h2>{escape(tag)}</h2>{''.join(calls)}" for tag, calls in groups.items())
    title = escape(info["title"])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}: API</title><style>{_STYLE}</style></head><body><h1>{title}: API</h1>"
        f"<p>{escape(info.get('summary', ''))} Version {escape(info['version'])}. "
        'The same for programs: <a href="openapi.json">openapi.json</a>. '
        f'<a href="./">The dashboard</a>.</p>{body}</body></html>'
    )


def _call_html(document: dict[str, Any], method: str, path: str, call: dict[str, Any]) -> str:
    parts = [f"<p>{escape(call.get('description', ''))}</p>"]
    rows = ""
    for each in call.get("parameters", ()):
        example = json.dumps(each["schema"]["examples"][0])
        cells = (each["name"], each["in"], each.get("description", ""), example)
        rows += f"<tr>{''.join(f'<td>{escape(cell)}' for cell in cells)}</tr>"
    if rows:
        parts.append(f"<table><tr><th>parameter<th>in<th>what<th>example</tr>{rows}</table>")
    if "requestBody" in call:
        parts.append(f"<p>body</p>{_content_html(document, call['requestBody']['content'])}")
    for status, response in call["responses"].items():
        content = _content_html(document, response.get("content", {}))
        summary = f"{escape(status)} {escape(response.get('description', ''))}"
        parts.append(f"<details><summary>{summary}</summary>{content}</details>")
    name = f"<code>{method.upper()} {escape(path)}</code> {escape(call.get('summary', ''))}"
    return f"<details><summary>{name}</summary>{''.join(parts)}</details>"


def _content_html(document: dict[str, Any], content: dict[str, Any]) -> str:
    parts = []
    for kind, media in content.items():
        example = _example(document, media)
        text = example if isinstance(example, str) else json.dumps(example, indent=2, ensure_ascii=False)
        parts.append(f"<p>{escape(kind)}</p><pre>{escape(text)}</pre>")
    return "".join(parts)


def _example(document: dict[str, Any], media: dict[str, Any]) -> Any:
    if "example" in media:
        return media["example"]
    schema = media.get("schema", {})
    if schema.get("type") == "array":
        return [_example(document, {"schema": schema["items"]})]
    name = schema.get("$ref", "").rpartition("/")[2]
    return document["components"]["schemas"].get(name, schema).get("example")
