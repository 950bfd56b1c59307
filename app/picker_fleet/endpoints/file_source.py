"""Endpoints from a watched file: YAML or JSON, a list of `{address: ip:port, labels: {…}, max_inflight: N}`.

The folder is watched and not the file, so that an atomic replace and Kubernetes' symlink swap are seen;
and the file is read again every few seconds, for file systems that announce no changes.
"""

import asyncio
import logging
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from watchfiles import awatch

from picker_fleet.endpoints.snapshot import Endpoint
from picker_fleet.endpoints.source import Report, endpoints_of
from picker_fleet.errors import StartupError
from picker_fleet.sections import EndpointList
from picker_fleet.yaml_source import YamlFault, read_yaml

_log = logging.getLogger(__name__)
_LIST: TypeAdapter[EndpointList] = TypeAdapter(EndpointList)
_READ_S = 5.0


class FileFault(ValueError):
    """A file that is no list of endpoints; the message is one line and says where."""


class FileSource:
    """Watches `path`. `recheck_s`: how often it is read again although no change was announced."""

    def __init__(self, path: Path, *, recheck_s: float = 5.0, settle_ms: int = 200) -> None:
        self._path = path
        self._recheck_ms = int(recheck_s * 1000)
        self._settle_ms = settle_ms  # a writer in several steps is let finish

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
            debounce=self._settle_ms,
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
        try:
            async with asyncio.timeout(_READ_S):  # a network file system can hang
                text = await asyncio.to_thread(self._path.read_text, encoding="utf-8")
        except OSError as fault:  # TimeoutError is one
            raise FileFault(f"cannot be read: {fault.strerror or 'no answer in time'}") from fault
        except UnicodeDecodeError as fault:
            raise FileFault(f"is not UTF-8 at byte {fault.start}") from fault
        return listed(text)


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
