"""Structured logs: one line a record on stderr, text or JSON, through the standard library's logging.

Whatever is passed as `extra` becomes a field of its own, so a line about a request is written
`log.info("expired", extra=about(request_id, flow, "expired"))` and found by any of the three. Names the
logging library itself uses for a record are not available as fields.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import IO

import orjson

# What every record carries; anything beyond was passed as `extra`.
_OWN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """A record as one JSON line: time (UTC, ISO 8601), level, logger, message, extras, exception."""

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
            # A lone surrogate, a huge integer: escaped or spelled out, but never a line that is lost.
            return json.dumps(
                {key: value if isinstance(value, str) else repr(value) for key, value in line.items()}
            )


class TextFormatter(logging.Formatter):
    """A record as one line to be read: time (UTC), level, logger, message, then extras as name=value.

    What clients had a hand in can't begin a line of its own: control characters are escaped.
    """

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        words = [
            time.replace("+00:00", "Z"),
            f"{record.levelname:7}",
            record.name,
            _one_line(record.getMessage()),
        ]
        words += [f"{name}={_word(value)}" for name, value in record.__dict__.items() if name not in _OWN]
        line = " ".join(words)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _one_line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)[1:-1]


def _word(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and not any(sign in text for sign in ' "=')
    return text if plain and text else json.dumps(text)


def about(request_id: str, flow: str | None = None, decision: str | None = None) -> dict[str, str]:
    """Extra fields of a line about one request; those that are None are left out."""
    fields = {"request_id": request_id, "flow": flow, "decision": decision}
    return {name: value for name, value in fields.items() if value is not None}


def setup(
    level: str = "INFO", stream: IO[str] | None = None, *, style: str = "json", **identity: str
) -> logging.Handler:
    """Send every logger's lines to `stream` (stderr), each with the fields of `identity` (replica, pool), in
    the `style` text or json.

    Replaces the root logger's handlers, and quiets libraries that log every call. Returns the handler.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())

    def identify(record: logging.LogRecord) -> bool:
        record.__dict__.update(identity)
        return True

    handler.addFilter(identify)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("uvicorn.access", "watchfiles", "asyncio", "httpx", "httpcore", "opentelemetry", "grpc"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of every request that is no HTTP
    return handler
