"""Structured logs by the standard library's logging: a line for each record on stderr, as text or JSON.

A replica calls the function `setup` once. Each key of `extra` becomes a field of the line; names that the
logging library uses itself cannot be used. `DecisionLines` writes one line for each decision.
"""

import asyncio
import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import IO, Final

import orjson

from picker_fleet.domain.errors import NoEndpoints
from picker_fleet.domain.request import InferenceRequest
from picker_fleet.scheduling.explain import Explanation

_log = logging.getLogger("picker_fleet.telemetry.decisions")  # operators filter log lines by this logger name
POOL: Final = ContextVar("pool", default="")  # the running task's pool, if there are several pools
AUDIT: Final = "picker_fleet.audit"  # name of the logger of changes by operators and of the configuration
_MAX_KINDS = 1000
_REFUSALS_PER_S = 5  # maximum lines a second for one refusal code, so that refusals do not flood the log

# The fields that every log record has; any other field was passed as `extra`.
_OWN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Makes a log record a JSON line: time (UTC, ISO 8601), level, logger, message, extras, exception."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in record.__dict__.items():
            if name not in _OWN and name not in line:
                line[name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(line, default=repr).decode()
        except TypeError:
            # orjson refuses lone surrogates and huge integers; the module `json` writes both.
            return json.dumps(
                {key: value if isinstance(value, str) else repr(value) for key, value in line.items()}
            )


class TextFormatter(logging.Formatter):
    """Makes a log record a line of text: time (UTC), level, logger, message, extras as name=value.

    Control characters are escaped, so that no text from a client can start a new line.
    """

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        said = record.getMessage()
        said = said if said.isprintable() else json.dumps(said)[1:-1]
        words = [time.replace("+00:00", "Z"), f"{record.levelname:7}", record.name, said]
        words += [f"{name}={_word(value)}" for name, value in record.__dict__.items() if name not in _OWN]
        line = " ".join(words)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _word(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and not any(sign in text for sign in ' "=')
    return text if plain and text else json.dumps(text)


def setup(
    level: str = "INFO", stream: IO[str] | None = None, *, style: str = "json", **identity: str
) -> logging.Handler:
    """Send the lines of all loggers to `stream` (default: stderr), in the `style` text or json.

    Each line has the fields of `identity` (replica, pool); if `identity` has no pool, `POOL` names the pool.
    Replaces the root logger's handlers, and silences libraries that log every call. Returns the handler.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())

    known = {name: value for name, value in identity.items() if value}

    def identify(record: logging.LogRecord) -> bool:
        record.__dict__.update(known)
        if pool := POOL.get():
            record.__dict__.setdefault("pool", pool)
        return True

    handler.addFilter(OneASecond())
    handler.addFilter(identify)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("uvicorn.access", "watchfiles", "asyncio", "httpx2", "httpcore2", "opentelemetry", "grpc"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # uvicorn would warn of malformed requests
    return handler


class OneASecond(logging.Filter):
    """Passes one log record of each kind a second, so that no peer can cause a flood of lines.

    A kind is a logger, an unformatted message and, of several pools, the pool. The field `left_out` counts
    the records dropped since the kind's last line. If no further record comes, the first dropped record is
    written a second later. `clock` returns seconds. Records below INFO, records of changes (AUDIT) and
    decision lines, which `DecisionLines` limits, always pass.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # Kind of record -> the time of the last line, and the number of records dropped since then.
        self._kinds: dict[tuple[str, object, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.INFO or record.name in (AUDIT, _log.name):
            return True
        kind, now_s = (record.name, record.msg, POOL.get()), self._clock()
        written_s, left_out = self._kinds.get(kind, (-math.inf, 0))
        if now_s - written_s < 1.0:
            self._kinds[kind] = written_s, left_out + 1
            if not left_out:
                self._repeat_later(record)
            return False
        if len(self._kinds) > _MAX_KINDS:
            self._kinds.clear()
        self._kinds[kind] = now_s, 0
        if left_out:
            record.left_out = left_out
        return True

    def _repeat_later(self, record: logging.LogRecord) -> None:
        """Write `record` after a second, unless a further record of its kind was written by then."""
        # Without an event loop there is no timer: the kind's next line has the number of dropped records.
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop().call_later(1.0, self._repeat, record)

    def _repeat(self, record: logging.LogRecord) -> None:
        if self._kinds.get((record.name, record.msg, POOL.get()), (0.0, 0))[1]:
            record.exc_info = None  # the first log line of a kind has the traceback
            logging.getLogger(record.name).handle(record)


class DecisionLines:
    """Logs each decision: placements at debug level, refusals at info level, with a limit for each code.

    Call `placed` only if `debug`. `explain`, called at debug level only, returns how a request's endpoint was
    chosen. `clock` returns seconds. Each line has the fields in `whose`. All calls come from one event loop.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        explain: Callable[[str], Explanation | None] = lambda request_id: None,
        **whose: str,
    ) -> None:
        self._whose = whose
        self.debug = _log.isEnabledFor(logging.DEBUG)
        self._explain = explain
        self._clock = clock
        self._second = -1
        self._written: dict[str, int] = {}
        self._left_out: dict[str, int] = {}

    def placed(
        self, request: InferenceRequest | None, endpoints: Sequence[str], mode: str, seconds: float
    ) -> None:
        """Log that a request goes to the first of `endpoints`; `request` is None for reads (GET)."""
        fields = {**self._whose, **_fields(request, "ok", mode, seconds), "endpoints": ",".join(endpoints)}
        _log.debug("placed", extra={**fields, **self._explanation(request)})

    def refused(
        self, request: InferenceRequest | None, code: str, status: int, mode: str, seconds: float
    ) -> None:
        """Log that a request was refused with `code` and the HTTP `status`, or that the client disconnected
        first (`client_gone`, 499). An unparsable `request` is None."""
        second = int(self._clock())
        if second != self._second:
            self._second = second
            self._written.clear()
        written = self._written.get(code, 0)
        if written >= _REFUSALS_PER_S and not self.debug:
            self._left_out[code] = self._left_out.get(code, 0) + 1
            return
        self._written[code] = written + 1
        fields = {**self._whose, **_fields(request, code, mode, seconds), "status": status}
        if self.debug and code == NoEndpoints.code:
            fields |= self._explanation(request)
        left_out = self._left_out.pop(code, 0)
        _log.info("refused", extra={**fields, "left_out": left_out} if left_out else fields)

    def _explanation(self, request: InferenceRequest | None) -> dict[str, str]:
        explained = None if request is None else self._explain(request.id)
        return {} if explained is None else explained.summary()


def _fields(request: InferenceRequest | None, code: str, mode: str, seconds: float) -> dict[str, object]:
    fields: dict[str, object] = {"mode": mode, "took_s": round(seconds, 6)}
    if request is None:
        return {"decision": code, **fields}
    return {
        "request_id": request.id,
        "flow": request.flow,
        "decision": code,
        "model": request.model,
        "band": request.band.name,
        **fields,
    }
