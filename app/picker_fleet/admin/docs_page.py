"""The API's own description: the OpenAPI document, and a page of it that loads nothing from anywhere."""

import asyncio
import json
from html import escape
from typing import Any

import orjson
from fastapi import Depends, FastAPI, Response

from picker_fleet.admin.page_routes import policy
from picker_fleet.admin.rate import Rate

Tree = dict[str, Any]

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


def add(app: FastAPI, rate: Rate) -> None:
    """Serve the document at `/openapi.json` and the page at `/docs`, written at the first call.

    `rate` is asked before each call.
    """
    asked = [Depends(rate)]
    written: list[tuple[bytes, bytes]] = []
    headers = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}

    async def texts() -> tuple[bytes, bytes]:
        if not written:
            # In a thread: to describe every model takes a tenth of a second.
            written.append(await asyncio.to_thread(_texts, app))
        return written[0]

    @app.get("/openapi.json", response_class=Response, include_in_schema=False, dependencies=asked)
    async def document() -> Response:
        return Response((await texts())[0], media_type="application/json", headers=headers)

    @app.get("/docs", response_class=Response, include_in_schema=False, dependencies=asked)
    async def docs() -> Response:
        page = (await texts())[1]
        guarded = {**headers, "content-security-policy": policy(page)}
        return Response(page, media_type="text/html; charset=utf-8", headers=guarded)


def _texts(app: FastAPI) -> tuple[bytes, bytes]:
    document = app.openapi()
    return orjson.dumps(document), page(document).encode()


def page(document: Tree) -> str:
    """The calls of an OpenAPI document as plain HTML, by tag."""
    about, groups = document["info"], dict[str, list[str]]()
    for path, calls in document["paths"].items():
        for method, call in calls.items():
            groups.setdefault(call["tags"][0], []).append(_call(document, method, path, call))
    body = "".join(f"<h2>{escape(tag)}</h2>{''.join(calls)}" for tag, calls in groups.items())
    title = escape(about["title"])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}: API</title><style>{_STYLE}</style></head><body><h1>{title}: API</h1>"
        f"<p>{escape(about.get('summary', ''))} Version {escape(about['version'])}. "
        'The same for programs: <a href="openapi.json">openapi.json</a>. '
        f'<a href="./">The dashboard</a>.</p>{body}</body></html>'
    )


def _call(document: Tree, method: str, path: str, call: Tree) -> str:
    parts = [f"<p>{escape(call.get('description', ''))}</p>"]
    if rows := "".join(_parameter(each) for each in call.get("parameters", ())):
        parts.append(f"<table><tr><th>parameter<th>in<th>what<th>example</tr>{rows}</table>")
    if "requestBody" in call:
        parts.append(f"<p>body</p>{_contents(document, call['requestBody']['content'])}")
    for status, response in call["responses"].items():
        inside = _contents(document, response.get("content", {}))
        said = f"{escape(status)} {escape(response.get('description', ''))}"
        parts.append(f"<details><summary>{said}</summary>{inside}</details>")
    name = f"<code>{method.upper()} {escape(path)}</code> {escape(call.get('summary', ''))}"
    return f"<details><summary>{name}</summary>{''.join(parts)}</details>"


def _parameter(each: Tree) -> str:
    words = (each["name"], each["in"], each.get("description", ""), json.dumps(each.get("example")))
    return f"<tr>{''.join(f'<td>{escape(word)}' for word in words)}</tr>"


def _contents(document: Tree, contents: Tree) -> str:
    return "".join(
        f"<p>{escape(kind)}</p><pre>{escape(_shown(_example(document, content)))}</pre>"
        for kind, content in contents.items()
    )


def _shown(example: Any) -> str:
    return example if isinstance(example, str) else json.dumps(example, indent=2, ensure_ascii=False)


def _example(document: Tree, content: Tree) -> Any:
    """Of a media type: its own, else its schema's."""
    if "example" in content:
        return content["example"]
    schema = content.get("schema", {})
    if schema.get("type") == "array":
        return [_example(document, {"schema": schema["items"]})]
    name = schema.get("$ref", "").rpartition("/")[2]
    return document["components"]["schemas"].get(name, schema).get("example")
