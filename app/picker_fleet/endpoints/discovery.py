"""Where the pool's endpoints come from: a static list, a watched file, DNS (dns_source.py), or an
InferencePool of Kubernetes (kubernetes_source.py).

pool.py runs the configured source. A source gives only the list; health, draining and load are known
elsewhere. A file is YAML or JSON: a list of entries as `discovery.static` has them. Its folder
is watched and not the file, so that an atomic replace and Kubernetes' symlink swap are seen; and it is read
again every few seconds, for file systems that announce no changes."""

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter, ValidationError
from watchfiles import awatch

from picker_fleet.config import YamlFault, read_yaml
from picker_fleet.errors import MissingExtra, StartupError
from picker_fleet.request import METRICS_PATH, METRICS_PORT, Endpoint
from picker_fleet.sections import Discovery, EndpointList, StaticEndpoint

Report = Callable[[tuple[Endpoint, ...]], None]


class Source(Protocol):
    async def watch(self, report: Report) -> None:
        """Call `report` with the whole list as soon as it is known and after each change.

        Runs until cancelled. A source that fails after that keeps its last good list and logs why.

        Raises:
            StartupError: there is no list to begin with, and waiting would not bring one.
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
    """Its labels, and those that say where its metrics page is."""
    page = {METRICS_PORT: entry.metrics_port, METRICS_PATH: entry.metrics_path}
    return entry.labels | {label: str(value) for label, value in page.items() if value is not None}


_log = logging.getLogger(__name__)
_LIST: TypeAdapter[EndpointList] = TypeAdapter(EndpointList)
_READ_S = 5.0
_SETTLE_MS = 200  # a writer may need several steps


class FileFault(ValueError):
    """A file that is not a list of endpoints; the message is one line and says where."""


class FileSource:
    """Watches `path`. `recheck_s`: how often it is read again although no change was announced."""

    def __init__(self, path: Path, *, recheck_s: float = 5.0) -> None:
        self._path = path
        self._recheck_ms = int(recheck_s * 1000)
        self._reading: asyncio.Future[str] | None = None

    async def watch(self, report: Report) -> None:
        """As Source.watch. Raises StartupError if the file is missing or broken at the start."""
        try:
            known = await self._read()
        except FileFault as fault:
            raise StartupError(f"endpoints file {self._path}: {fault}") from fault
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
                    _log.warning("endpoints file %s: %s; the last good list stays in use", self._path, fault)
                continue
            trouble = ""
            if found != known:
                known = found
                report(known)

    async def _read(self) -> tuple[Endpoint, ...]:
        # A network file system can hang: then the same reading is waited for again.
        if self._reading is None or self._reading.done():
            self._reading = _text_of(self._path)
        try:
            async with asyncio.timeout(_READ_S):
                text = await asyncio.shield(self._reading)
        except OSError as fault:  # TimeoutError is one
            raise FileFault(f"cannot be read: {fault.strerror or 'no answer in time'}") from fault
        except UnicodeDecodeError as fault:
            raise FileFault(f"is not UTF-8 at byte {fault.start}") from fault
        return listed(text)


def _text_of(path: Path) -> asyncio.Future[str]:
    """The text of a file, read in a thread that does not keep the process from ending, as one of the event
    loop's own would."""
    text: concurrent.futures.Future[str] = concurrent.futures.Future()

    def read() -> None:
        try:
            text.set_result(path.read_text(encoding="utf-8"))
        except Exception as fault:
            text.set_exception(fault)

    threading.Thread(target=read, name="endpoints-file", daemon=True).start()
    reading = asyncio.wrap_future(text)
    reading.add_done_callback(lambda done: done.cancelled() or done.exception())
    return reading


def listed(text: str) -> tuple[Endpoint, ...]:
    """The endpoints that `text` lists.

    Raises:
        FileFault: it is not YAML or JSON, not such a list, or empty. An empty text is a file caught
            half written; a pool without endpoints is spelled `[]`.
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
        message = first["msg"].removeprefix("Value error, ")
        raise FileFault(f"{where}: {message}") from fault


_ROLE = "llm-d.ai/role"
_DECODING_ROLES = ("both", "all", "flexible-decoder")


def decodes(endpoint: Endpoint) -> bool:
    """Whether requests may be sent to it: its role, if it has one, includes `decode`. Others are asked by
    decoders only, for a prompt's cache or an encoded image."""
    role = endpoint.labels.get(_ROLE, "")
    return not role or role in _DECODING_ROLES or "decode" in role.split("-")


def serving(labels: Mapping[str, str], report: Report) -> Report:
    """Reports to `report` those endpoints that have `labels` and decode; it is logged which are left out."""
    logged: list[str] = []

    def report_serving(endpoints: tuple[Endpoint, ...]) -> None:
        serve = tuple(each for each in endpoints if decodes(each) and labels.items() <= each.labels.items())
        others = sorted({each.address for each in endpoints} - {each.address for each in serve})
        if others != logged:
            logged[:] = others
            which = ", ".join(others[:8])
            _log.info("%d endpoints get no requests, by their labels or %s: %s", len(others), _ROLE, which)
        report(serve)

    return report_serving


def source_of(settings: Discovery) -> Source:
    """The source that `settings` names; an empty static list if it names none.

    Raises:
        MissingExtra: `settings` name an InferencePool, and the Kubernetes client is not installed.
    """
    if settings.file is not None:
        return FileSource(settings.file)
    if settings.dns is not None:
        # Its package takes a tenth of a replica's start.
        from picker_fleet.endpoints.dns_source import DnsSource

        return DnsSource(settings.dns.name, settings.dns.port, interval_s=settings.dns.interval)
    if settings.kubernetes is not None:
        try:
            from picker_fleet.endpoints.kubernetes_source import KubernetesSource
        except ImportError as fault:
            raise MissingExtra(
                f"discovery.kubernetes needs {fault.name or fault}, which is not installed: "
                "pip install 'picker-fleet[kubernetes]'"
            ) from None
        return KubernetesSource(settings.kubernetes.pool, settings.kubernetes.namespace)
    return Static(settings.static or ())
