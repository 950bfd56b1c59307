"""A small HTTP server with the Kubernetes API's list and watch, for tests of the Kubernetes source.

The server keeps objects by collection, and a history of changes. The method `expire` forgets the history of
changes; `stop` and `start` simulate an outage. The list `calls` records all HTTP calls, in order.
"""

import asyncio
import contextlib
import copy
import json
import ssl
from collections import Counter
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx2

from picker_kubernetes.api import Api

PODS = "/api/v1/namespaces/models/pods"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/models/inferencepools"


def pod(name: str, address: str, *, ready: bool = True, app: str = "llm", **more: Any) -> dict[str, Any]:
    """A running pod."""
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {
        "metadata": {"name": name, "namespace": "models", "labels": {"app": app}, **more},
        "status": {"phase": "Running", "podIP": address, "conditions": conditions},
    }


def pool(*ports: int, app: str = "llm") -> dict[str, Any]:
    """The InferencePool `llm`."""
    spec = {
        "selector": {"matchLabels": {"app": app}},
        "targetPorts": [{"number": port} for port in ports],
        "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
    }
    return {"metadata": {"name": "llm", "namespace": "models"}, "spec": spec}


class ApiServer:
    """A server that listens on a free loopback port while its context is open."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, dict[str, str]]] = []
        self.refuse: tuple[int, str] | None = None  # the status and message that answer every call, if set
        self._objects: dict[tuple[str, str], dict[str, Any]] = {}
        self._history: list[tuple[int, str, str, dict[str, Any]]] = []  # changes: version, type, path, object
        self._version = 100
        self._oldest = 100
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.tls: ssl.SSLContext | None = None  # serve HTTPS from the next start on

    async def __aenter__(self) -> "ApiServer":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse new connections and cut the open ones."""
        assert self._server is not None
        self._server.close()
        await self.cut()
        await self._server.wait_closed()

    async def cut(self) -> None:
        """Cut all connections."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def api(self) -> Api:
        return Api(httpx2.AsyncClient(base_url=f"http://127.0.0.1:{self.port}"), "models")

    @property
    def kinds(self) -> Counter[str]:
        """The number of list and watch calls by collection, under keys like `list pods`."""
        return Counter(
            f"{'watch' if 'watch' in params else 'list'} {path.rsplit('/', 1)[1]}"
            for method, path, params in self.calls
            if method == "GET"
        )

    def put(self, path: str, item: dict[str, Any]) -> None:
        """Create or replace an object."""
        name = item["metadata"]["name"]
        self._change("MODIFIED" if (path, name) in self._objects else "ADDED", path, item)

    def delete(self, path: str, name: str) -> None:
        self._change("DELETED", path, self._objects[path, name])

    def bookmark(self, path: str) -> None:
        """Send watches a bookmark: a new resource version without a changed object."""
        self._change("BOOKMARK", path, {"metadata": {"name": ""}})

    async def expire(self) -> None:
        """Forget the history of changes, and end all watches."""
        self._oldest = self._version
        self._history.clear()
        await self.cut()

    def _change(self, what: str, path: str, item: dict[str, Any]) -> None:
        self._version += 1
        item = copy.deepcopy(item)
        item["metadata"]["resourceVersion"] = str(self._version)
        name = item["metadata"]["name"]
        if what == "DELETED":
            del self._objects[path, name]
        elif what != "BOOKMARK":
            self._objects[path, name] = item
        self._history.append((self._version, what, path, item))
        self._changed.set()
        self._changed = asyncio.Event()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        ends = (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError)
        with contextlib.suppress(*ends):
            while await self._answer(reader, writer):
                pass
        self._tasks.discard(task)
        writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, target, _ = head.split("\r\n", 1)[0].split(" ")
        fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        await reader.readexactly(int(fields.get("content-length", 0)))
        url = urlsplit(target)
        params = dict(parse_qsl(url.query))
        self.calls.append((method, url.path, params))
        if self.refuse is not None:
            code, message = self.refuse
            return await self._send(writer, code, {"kind": "Status", "code": code, "message": message})
        if "watch" in params:
            await self._watch(writer, url.path, params)
            return False
        found = [item for (path, _), item in self._objects.items() if path == url.path]
        items = [item for item in found if _selected(item, params)]
        metadata = {"resourceVersion": str(self._version)}
        return await self._send(writer, 200, {"kind": "List", "metadata": metadata, "items": items})

    async def _send(self, writer: asyncio.StreamWriter, code: int, answer: dict[str, Any]) -> bool:
        text = json.dumps(answer).encode()
        head = f"HTTP/1.1 {code} X\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
        writer.write(head.encode() + text)
        await writer.drain()
        return True

    async def _watch(self, writer: asyncio.StreamWriter, path: str, params: dict[str, str]) -> None:
        version = int(params["resourceVersion"])
        kind, chunked = b"content-type: application/json\r\n", b"transfer-encoding: chunked\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n" + kind + chunked + b"\r\n")
        if version < self._oldest:
            expired = {"code": 410, "message": "too old resource version", "reason": "Expired"}
            self._line(writer, "ERROR", {"kind": "Status", **expired})
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            return
        while True:
            changed = self._changed
            for number, what, where, item in self._history:
                if number > version and where == path and (what == "BOOKMARK" or _selected(item, params)):
                    self._line(writer, what, item)
            version = self._version
            await writer.drain()
            await changed.wait()

    @staticmethod
    def _line(writer: asyncio.StreamWriter, what: str, item: dict[str, Any]) -> None:
        text = json.dumps({"type": what, "object": item}).encode() + b"\n"
        writer.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")


def _selected(item: dict[str, Any], params: dict[str, str]) -> bool:
    wanted = [part.split("=") for part in params.get("labelSelector", "").split(",") if part]
    labels = item["metadata"].get("labels", {})
    name = params.get("fieldSelector", "").removeprefix("metadata.name=")
    return all(labels.get(key) == value for key, value in wanted) and name in ("", item["metadata"]["name"])
