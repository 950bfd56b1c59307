"""Sources of the pool's endpoints: a static list, a watched file, DNS (dns_source.py), or a Kubernetes
InferencePool (kubernetes_source.py).

pool.py runs the configured source. A source only lists endpoints; other modules track health and load. A file
is YAML or JSON: a list with the entries of `discovery.static`. WatchedFile watches the file's folder, so that
it notices an atomic replace and Kubernetes' symlink swap, and reads the file again every few seconds, for
file systems that announce no changes. pool.py also uses it for a file of tenants."""

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError
from watchfiles import awatch

from picker_fleet.domain.config import YamlFault, read_yaml
from picker_fleet.domain.errors import MissingExtra, StartupError
from picker_fleet.domain.request import METRICS_PATH, METRICS_PORT, Endpoint
from picker_fleet.domain.sections import Discovery, EndpointList, StaticEndpoint

T = TypeVar("T")
Report = Callable[[tuple[Endpoint, ...]], None]


class Source(Protocol):
    async def watch(self, report: Report) -> None:
        """Call `report` with the whole list as soon as it is known and after each change.

        Runs until cancelled. A source that fails later logs the fault; the last good list stays in use.

        Raises:
            StartupError: the source has no list at the start, and waiting would not help.
        """
        ...


class Static:
    def __init__(self, listed: tuple[StaticEndpoint, ...]) -> None:
        self._endpoints = endpoints_of(listed)

    async def watch(self, report: Report) -> None:
        report(self._endpoints)
        await asyncio.Event().wait()


def endpoints_of(listed: tuple[StaticEndpoint, ...]) -> tuple[Endpoint, ...]:
    return tuple(
        Endpoint(address=entry.address, labels=_labels(entry), max_inflight=entry.max_inflight)
        for entry in listed
    )


def _labels(entry: StaticEndpoint) -> dict[str, str]:
    """The entry's labels, and added labels for the port and path of the endpoint's metrics page."""
    page = {METRICS_PORT: entry.metrics_port, METRICS_PATH: entry.metrics_path}
    return entry.labels | {label: str(value) for label, value in page.items() if value is not None}


_log = logging.getLogger(__name__)
_LIST: TypeAdapter[EndpointList] = TypeAdapter(EndpointList)
_READ_S = 5.0
_SETTLE_MS = 200  # debounce: writing the file may take several steps


class FileFault(ValueError):
    """The file's content is not as expected; the message is one line and names the place."""


class WatchedFile(Generic[T]):
    """Watches the file `path`, which contains `what`; reads the file every `recheck_s` seconds even if no
    change is announced. `parse` makes the content of the text, in a thread; it raises FileFault."""

    def __init__(self, path: Path, parse: Callable[[str], T], what: str, *, recheck_s: float = 5.0) -> None:
        self._path, self._parse, self._what = path, parse, what
        self._recheck_ms = int(recheck_s * 1000)
        self._reading: asyncio.Future[str] | None = None
        self._parsed: tuple[str, T] | None = None  # (the file's last text, its parsed content)

    async def watch(self, report: Callable[[T], object]) -> None:
        """As Source.watch. Raises StartupError if the file is missing or malformed at the start."""
        try:
            known = await self._read()
        except FileFault as fault:
            raise StartupError(self._told(fault)) from fault
        report(known)
        trouble = ""
        async for _ in awatch(
            self._path.parent,
            watch_filter=None,
            recursive=False,
            debounce=_SETTLE_MS,
            rust_timeout=self._recheck_ms,
            yield_on_timeout=True,
        ):
            try:
                found = await self._read()
            except FileFault as fault:
                if str(fault) != trouble:
                    trouble = str(fault)
                    _log.warning("%s; the last good list stays in use", self._told(fault))
                continue
            trouble = ""
            if found != known:
                known = found
                report(known)

    async def _read(self) -> T:
        # A read from a network file system can hang: then wait again for that read, without another thread.
        if self._reading is None or self._reading.done():
            self._reading = _in_thread(self._text)
        try:
            async with asyncio.timeout(_READ_S):
                text = await asyncio.shield(self._reading)
        except TimeoutError as fault:
            raise FileFault("cannot be read: no answer in time") from fault
        if self._parsed is None or self._parsed[0] != text:
            self._parsed = text, await _in_thread(partial(self._parse, text))
        return self._parsed[1]

    def fault(self) -> str:
        """The fault in the file's present content; '' if it is valid."""
        try:
            self._parse(self._text())
        except FileFault as fault:
            return self._told(fault)
        return ""

    def _told(self, fault: FileFault) -> str:
        return f"{self._what} file {self._path}: {fault}"

    def _text(self) -> str:
        try:
            return self._path.read_text(encoding="utf-8")
        except OSError as fault:
            raise FileFault(f"cannot be read: {fault.strerror}") from fault
        except UnicodeDecodeError as fault:
            raise FileFault(f"is not UTF-8 at byte {fault.start}") from fault


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """The result of `work` in a daemon thread: a hanging read in a thread of the event loop's executor would
    keep the process from ending."""
    result: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            result.set_result(work())
        except Exception as fault:
            result.set_exception(fault)

    threading.Thread(target=run, name="watched-file", daemon=True).start()
    running = asyncio.wrap_future(result)
    running.add_done_callback(lambda done: done.cancelled() or done.exception())
    return running


def listed(text: str) -> tuple[Endpoint, ...]:
    """Parse the list of endpoints in `text`.

    Raises:
        FileFault: the file's `text` is not YAML or JSON, not a list of endpoints, or empty. An empty text
            means a half-written file; a pool without endpoints is written `[]`.
    """
    try:
        tree = read_yaml(text)
    except YamlFault as fault:
        raise FileFault(str(fault)) from fault
    if tree is None:
        raise FileFault("is empty; a pool without endpoints is written []")
    try:
        return endpoints_of(_LIST.validate_python(tree))
    except ValidationError as fault:
        first = fault.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the list"
        message = first["msg"].removeprefix("Value error, ").replace("valid tuple", "valid list")
        raise FileFault(f"{where}: {message}") from fault


def source_of(settings: Discovery) -> Source:
    """The source that `settings` names; an empty static list if `settings` names no source.

    Raises:
        MissingExtra: the source is an InferencePool, but the Kubernetes client is not installed.
    """
    if settings.file is not None:
        return WatchedFile(settings.file, listed, "endpoints")
    if settings.dns is not None:
        # Import the DNS source only if needed: its package takes a tenth of a replica's start-up time.
        from picker_fleet.endpoints.dns_source import DnsSource

        return DnsSource(settings.dns.name, settings.dns.port, interval_s=settings.dns.interval)
    if settings.kubernetes is not None:
        try:
            from picker_kubernetes.source import KubernetesSource
        except ImportError as fault:
            raise MissingExtra(
                f"discovery.kubernetes needs {fault.name or fault}, which is not installed: "
                "pip install 'picker-fleet[kubernetes]'"
            ) from None
        return KubernetesSource(settings.kubernetes.pool, settings.kubernetes.namespace)
    return Static(settings.static or ())
