"""Watches objects in the Kubernetes API: has the credentials, one connection pool, and the reflector.

A `Reflector` (client-go's term) keeps a copy of the objects of one collection: it lists the objects once and
then watches them. lightkube provides credentials, TLS and the HTTP client; this module decides what to read,
when to list again and how long to wait before a retry.
"""

import asyncio
import contextlib
import logging
import os
import random
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, Self, TypeVar

import httpx2
import msgspec
from lightkube.config.client_adapter import AsyncClient, ConnectionParams, verify_cluster
from lightkube.config.kubeconfig import KubeConfig
from lightkube.config.models import User
from lightkube.core.exceptions import ConfigError as CredentialsFault

from picker_fleet.domain.errors import MALFORMED, StartupError

_log = logging.getLogger(__name__)

_CONNECT_S = 3.0
_ANSWER_S = 10.0  # seconds for an answer of the API, enough to list thousands of pods
_WATCH_S: Final = (300, 600)  # each watch has a random timeout, in seconds, in this range, as in client-go
_LATE_S = 30.0  # the server must end a watch within this many seconds after the watch's timeout
_RETRY_S: Final = (0.05, 0.5)  # first and longest pause (s) before a retry; jitter shortens it by up to half
_REFUSED_S = 5.0  # longest pause, in seconds, before a retry after a lasting refusal, such as status 403
_ENDED_SOON_S = 1.0  # a watch that ends within this many seconds counts as a fault
_UNSERVED_S = 30.0  # longest pause, in seconds, between requests for an optional kind that the server lacks
_RELIST_S = 0.3  # after a watch has expired, list again after a random part of this many seconds
_CONNECTIONS = 8
# With these socket options TCP detects within 10 s that a server has vanished.
_KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, option), value)
        for option, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))
        if hasattr(socket, option)
    ),
]


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """An object's metadata without `resourceVersion`, since a new version alone is no change."""

    name: str = ""
    namespace: str = ""
    generation: int = 0
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class _Version(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""


class _List(msgspec.Struct):
    metadata: _Version
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    """The `Status` object of a failed API call. This class also decodes the version of a bookmark event."""

    code: int = 0
    message: str = ""
    metadata: _Version | None = None


class _Versioned(msgspec.Struct):
    metadata: _Version


class KubernetesFault(Exception):
    """Raised if a call to the API server fails. `code` is the HTTP status, 0 without a response."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}" if code else text)
        self.code = code


CONFLICT: Final = 409
_DEEPEST = 12_000  # the JSON reader of API servers nests at most 10 000 objects
_EXPIRED, _TOO_NEW = 410, 504  # the server no longer has the resource version, or does not have it yet
_ANSWERED_FOR_GOOD = range(400, 500)


class Api:
    """One Kubernetes API server, called with this process's credentials."""

    def __init__(
        self, client: httpx2.AsyncClient, namespace: str, read_authority: Callable[[], object] = lambda: None
    ) -> None:
        self._client = client
        self.namespace = namespace  # the default namespace of the credentials
        self._read_authority = read_authority  # reads the file of trusted authorities again

    @classmethod
    def of_environment(cls) -> "Api":
        """The API server that the variable `KUBECONFIG`, the service account or ~/.kube/config gives.

        Raises:
            StartupError: credentials are missing or unusable.
        """
        try:
            named = os.environ.get("KUBECONFIG")
            config = (KubeConfig.from_file(named) if named else KubeConfig.from_env()).get()
            if config is None:
                raise CredentialsFault("the kubeconfig has no current context")
            if config.user is None:
                config = config._replace(user=User())
            context = verify_cluster(config.cluster, config.user or User(), config.abs_file)
            transport = httpx2.AsyncHTTPTransport(
                verify=context,
                limits=httpx2.Limits(max_connections=_CONNECTIONS),
                socket_options=_KEEPALIVE,
            )
            timeout = httpx2.Timeout(_ANSWER_S, connect=_CONNECT_S)
            connection = ConnectionParams(timeout=timeout)
            connection.transport = transport  # type: ignore[assignment]  # fits both kinds of client
            client = AsyncClient(config, connection)
            trusted = config.abs_file(config.cluster.certificate_auth or os.devnull)
        except (CredentialsFault, OSError, KeyError, ValueError, msgspec.MsgspecError) as fault:
            raise StartupError(f"no credentials for the Kubernetes API: {fault}") from fault
        return cls(client, config.namespace, partial(context.load_verify_locations, trusted))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(1):
                await self._client.aclose()

    async def get(self, path: str, params: Mapping[str, str]) -> bytes:
        """The body of the response to a GET. Raises KubernetesFault."""
        return await self._call("GET", path, params=params)

    async def apply_status(self, path: str, tree: Mapping[str, Any], *, manager: str, force: bool) -> None:
        """Apply `tree` to an object's status (server-side apply) as the field manager `manager`. `force`
        takes over fields that another manager owns.

        Raises:
            KubernetesFault: the call failed. Code CONFLICT: another manager owns a field with another value.
        """
        await self._call(
            "PATCH",
            f"{path}/status",
            params={"fieldManager": manager, "force": "true" if force else "false"},
            content=msgspec.json.encode(tree),
            headers={"content-type": "application/apply-patch+yaml"},  # JSON is valid YAML
        )

    async def _call(self, method: str, path: str, **options: Any) -> bytes:
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await self._client.request(method, path, **options)
        except (httpx2.HTTPError, OSError, CredentialsFault) as fault:  # OSError includes TimeoutError
            raise self._failed(fault) from fault
        if answer.status_code != httpx2.codes.OK:
            raise _refusal(answer.status_code, answer.content)
        return answer.content

    async def lines(
        self, path: str, params: Mapping[str, str], limit_s: float
    ) -> AsyncGenerator[bytes, None]:
        """The lines of a response that the server streams for at most `limit_s` seconds. First yields an
        empty line, when the response begins.

        Raises:
            KubernetesFault: the call failed before or during the response.
        """
        timeout = httpx2.Timeout(_ANSWER_S, connect=_CONNECT_S, read=None)
        deadline_s = asyncio.get_running_loop().time() + limit_s
        rest = b""
        try:
            request = self._client.build_request("GET", path, params=params, timeout=timeout)
            async with asyncio.timeout(_ANSWER_S):
                answer = await self._client.send(request, stream=True)
            try:
                if answer.status_code != httpx2.codes.OK:
                    raise _refusal(answer.status_code, await answer.aread())
                yield b""
                parts = answer.aiter_bytes().__aiter__()
                while True:
                    async with asyncio.timeout_at(deadline_s):
                        part = await anext(parts, None)
                    if part is None:
                        return
                    *whole, rest = (rest + part).split(b"\n")
                    for line in whole:
                        yield line
            finally:
                await answer.aclose()
        except (httpx2.HTTPError, OSError, CredentialsFault) as fault:
            raise self._failed(fault) from fault

    def _failed(self, fault: Exception) -> KubernetesFault:
        """The fault of a call without a response. The next call trusts an authority that has been renewed."""
        text = _text_of(fault)
        if "CERTIFICATE_VERIFY_FAILED" in text:
            with contextlib.suppress(OSError):
                self._read_authority()
        return KubernetesFault(0, text)


@contextlib.contextmanager
def _deeply() -> Iterator[None]:
    """Decode JSON as deeply nested as an API server stores it: an object's author may nest its
    `managedFields`, and one such object must not hide the others."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _DEEPEST))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def _text_of(fault: Exception) -> str:
    return " ".join(str(fault).split())[:200] or type(fault).__name__


def _refusal(code: int, body: bytes) -> KubernetesFault:
    try:
        text = msgspec.json.decode(body, type=_Status).message
    except msgspec.MsgspecError:
        text = body[:200].decode(errors="replace")
    return KubernetesFault(code, " ".join(text.split())[:300])


@dataclass(frozen=True, slots=True)
class Collection:
    """A collection of objects to watch, restricted by `labels` and `name`. `what` names the objects in logs.

    `optional`: an API server may not have this kind of object.
    """

    what: str
    path: str
    labels: Mapping[str, str] | None = None  # labels that the watched objects must have
    name: str | None = None  # watch only the object with this name
    optional: bool = False

    @property
    def params(self) -> dict[str, str]:
        found = {}
        if self.labels:
            found["labelSelector"] = ",".join(f"{key}={value}" for key, value in sorted(self.labels.items()))
        if self.name is not None:
            found["fieldSelector"] = f"metadata.name={self.name}"
        return found


Kind = TypeVar("Kind", bound=msgspec.Struct)


class Reflector(Generic[Kind]):
    """Keeps a copy of the objects of a collection, by name.

    A reflector lists the objects once, then watches from the list's version, also after watch timeouts and
    server outages. The reflector lists again only if the server no longer has that version (status 410), and
    then accepts no list older than `items`. The reflector keeps `items` while the server is unreachable, and
    calls `on_change` after each change of `items`. An object that cannot be decoded is logged and skipped.
    """

    def __init__(
        self,
        api: Api,
        collection: Collection,
        kind: type[Kind],
        on_change: Callable[[], None],
        *,
        draw: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._api, self._collection = api, collection
        self._decoder = msgspec.json.Decoder(kind)
        self._on_change, self._draw = on_change, draw
        self.items: dict[str, Kind] = {}
        self.listed = False  # whether the first list has succeeded, even an empty list
        self._version = ""
        self._pause_s = _RETRY_S[0]
        self._refused = False  # whether the last fault was a refusal (status 4xx, except 429)
        self._logged = ""

    async def run(self) -> None:
        """Watch the collection until cancelled. After a fault, retry."""
        expired = True
        while True:
            try:
                if expired:
                    await self._list()
                    expired = False
                await self._watch()
            except KubernetesFault as fault:
                if fault.code == _EXPIRED:
                    expired = True
                    _log.info("the watch of %s expired; listing again", self._collection.what)
                    await asyncio.sleep(self._draw(0, max(_RELIST_S, self._pause_s)))
                    self._pause_s = min(2 * self._pause_s, _RETRY_S[1])
                    continue
                if self._collection.optional and fault.code == httpx2.codes.NOT_FOUND:
                    expired, self._version = True, ""
                    if self.items:
                        self.items = {}
                        self._on_change()
                    await asyncio.sleep(self._draw(_UNSERVED_S / 2, _UNSERVED_S))
                    continue
                self._log_fault(fault)
                refused = fault.code in _ANSWERED_FOR_GOOD and fault.code != httpx2.codes.TOO_MANY_REQUESTS
                if refused != self._refused:
                    # A server that has restarted refuses every client until it has loaded its access rules.
                    self._refused, self._pause_s = refused, _RETRY_S[0]
                pause_s = self._pause_s
                self._pause_s = min(2 * pause_s, _REFUSED_S if refused else _RETRY_S[1])
                await asyncio.sleep(self._draw(pause_s / 2, pause_s))

    async def _list(self) -> None:
        # Version 0 lists from the server's cache, to spare etcd; a later list must not be older than `items`.
        versions = {"resourceVersion": self._version or "0"}
        if self._version:
            versions["resourceVersionMatch"] = "NotOlderThan"
        path, selection = self._collection.path, self._collection.params
        try:
            body = await self._api.get(path, selection | versions)
        except KubernetesFault as fault:
            if not self._version or fault.code != _TOO_NEW:
                raise
            body = await self._api.get(path, selection)  # the server was restored from an older backup
        try:
            with _deeply():
                found = msgspec.json.decode(body, type=_List)
        except MALFORMED as fault:
            raise KubernetesFault(0, f"the response is not a list: {_text_of(fault)}") from fault
        items = {}
        for raw in found.items or ():
            metadata, item = self._decoded(raw)
            if item is not None:
                items[metadata.name] = item
        self._version = found.metadata.resource_version
        if not self.listed or items != self.items:
            self.items, self.listed = items, True
            self._on_change()

    async def _watch(self) -> None:
        lasts_s = int(self._draw(*_WATCH_S))
        params = self._collection.params | {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(lasts_s),
        }
        begun_s = asyncio.get_running_loop().time()
        lines = self._api.lines(self._collection.path, params, lasts_s + _LATE_S)
        async with contextlib.aclosing(lines):
            async for line in lines:
                if line:
                    self._take(line)
                    self._pause_s = _RETRY_S[0]
                elif self._logged:
                    self._logged = ""
                    _log.info("watching %s again", self._collection.what)
        if asyncio.get_running_loop().time() - begun_s < _ENDED_SOON_S:
            raise KubernetesFault(0, "the watch ended as soon as it began")

    def _take(self, line: bytes) -> None:
        try:
            with _deeply():
                event = msgspec.json.decode(line, type=_Event)
            if event.type in ("BOOKMARK", "ERROR"):
                status = msgspec.json.decode(event.object, type=_Status)
                if event.type == "ERROR":
                    raise KubernetesFault(status.code, status.message[:300])
                if status.metadata is not None:
                    self._version = status.metadata.resource_version or self._version
                return
        except MALFORMED as fault:
            raise KubernetesFault(0, f"the line is not a watch event: {_text_of(fault)}") from fault
        metadata, item = self._decoded(event.object)
        self._version = metadata.resource_version or self._version
        name, former = metadata.name, self.items.get(metadata.name)
        if event.type == "DELETED":
            self.items.pop(name, None)
        elif item is not None:
            self.items[name] = item
        if self.items.get(name) != former:
            self._on_change()

    def _decoded(self, raw: msgspec.Raw) -> tuple[_Version, Kind | None]:
        """The name and version of an object, and the object; None for an object that cannot be decoded."""
        metadata = _Version()
        try:
            with _deeply():
                metadata = msgspec.json.decode(raw, type=_Versioned).metadata
                return metadata, self._decoder.decode(raw)
        except MALFORMED as fault:
            _log.warning("skipping one of %s that cannot be decoded: %s", self._collection.what, fault)
            return metadata, None

    def _log_fault(self, fault: KubernetesFault) -> None:
        """Log a fault, unless the last logged fault was the same and no watch has succeeded since then."""
        if str(fault) != self._logged:
            self._logged = str(fault)
            stays = "keeping the last known objects" if self.listed else "no list has succeeded yet"
            # The log writes each template at most once a second, so the template names the collection.
            _log.warning(f"cannot watch {self._collection.what}: %s; %s", fault, stays)
