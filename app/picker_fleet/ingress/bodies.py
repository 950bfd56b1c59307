"""Reads bodies that are not plain JSON: compressed bodies, forms, and JSON in other character sets.

The ext_proc exchange and the HTTP check call `decode` for a request with a content-encoding; intake calls the
other functions for bodies that its JSON reader refuses. The forwarded body stays as the client sent it.
"""

import asyncio
import codecs
import json
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple
from urllib.parse import quote_plus, unquote_plus

import brotli  # type: ignore[import-untyped, unused-ignore]
import zstandard

from picker_fleet.domain.budgets import BodyBuffer
from picker_fleet.domain.errors import BadRequest, Unsupported, UnsupportedEncoding

_MOST_ENCODINGS = 2
_STEP_BYTES = 256 * 1024  # maximum bytes that a decoder returns at once
_STEP_S = 0.001  # after decoding for this many seconds, let the event loop run other tasks
_SLICE_BYTES = 16 * 1024
_ZSTD_SLICE_BYTES = 256  # four bytes of zstd can expand to 128 KiB; the decoder has no output limit
_ZSTD_WINDOW_BYTES = 8 * 1024 * 1024  # the largest zstd window, in bytes, that RFC 9659 allows for HTTP
_MOST_PARTS = 64  # maximum consecutive gzip members or zstd frames

# To decode a lone surrogate takes 0.2 to 1 µs, a hundred times as long as another character.
_HALVES_SLICE_BYTES = 1024
_MOST_HALVED_SLICES = 64  # maximum slices of a body that may have lone surrogates

_MAX_FIELDS = 256
_MAX_FIELD_HEAD, _MAX_FIELD_HEADS = 8192, 64 * 1024  # bytes of a field's headers, and of all fields'
_MAX_MODEL_BYTES = 4096
_BOUNDARY = re.compile(rb'boundary=(?:"([^"\r\n]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)
_DISPOSITION = re.compile(rb"(?:^|\r\n)content-disposition[ \t]*:([^\r\n]*)", re.IGNORECASE)
_PARAMETER = re.compile(rb';[ \t]*([^\s=;"]+)[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))')


async def decode(
    text: bytes, encodings: bytes, new_buffer: Callable[[], BodyBuffer], turn: asyncio.Lock
) -> tuple[bytes, BodyBuffer]:
    """Decode `text` by its content-encodings. Also returns the buffer that charges the result to the budget.

    The lock `turn` lets one body be decoded at a time, since a decoder needs memory for its window.

    Raises:
        UnsupportedEncoding: an encoding is unknown or wrong, or `text` has too many encodings.
        PayloadTooLarge: the decoded body exceeds the limit.
        BufferFull: the replica's budget for bodies is used up.
    """
    names = [name.strip().lower() for name in encodings.decode("latin-1").split(",")]
    names = [name for name in names if name not in ("", "identity")]
    for name in names:
        if name not in _DECODERS:
            raise UnsupportedEncoding(
                f"content-encoding {name[:40]!r} is not supported; gzip, deflate, br and zstd are"
            )
    if len(names) > _MOST_ENCODINGS:
        raise UnsupportedEncoding(f"more than {_MOST_ENCODINGS} content-encodings: {', '.join(names)[:80]}")
    buffer = new_buffer()
    try:
        async with turn:
            for name in reversed(names):
                inner = new_buffer()
                try:
                    await _decode(name, text, inner)
                except BaseException:
                    inner.release()
                    raise
                buffer.release()
                buffer, text = inner, inner.join()
    except BaseException:
        buffer.release()
        raise
    return text, buffer


async def _decode(name: str, text: bytes, into: BodyBuffer) -> None:
    began_s = time.perf_counter()
    try:
        for chunk in _DECODERS[name](text):
            if chunk:
                into.add(chunk)
            if time.perf_counter() - began_s > _STEP_S:
                await asyncio.sleep(0)
                began_s = time.perf_counter()
    except (zlib.error, brotli.error, zstandard.ZstdError, EOFError) as fault:
        raise UnsupportedEncoding(f"content-encoding {name}: the body cannot be decoded: {fault}") from None


# Yields the decoded bytes of short inputs; also b'': an input may take long to decode and give no bytes.
_Steps = Iterator[bytes]


def _inflated(text: bytes, window_bits: int) -> _Steps:
    at = parts = 0
    while at < len(text):
        parts += 1
        if parts > _MOST_PARTS:
            raise EOFError(f"more than {_MOST_PARTS} members")
        decoder = zlib.decompressobj(window_bits)
        while not decoder.eof:
            if at >= len(text):
                raise EOFError("it is cut off")
            more = text[at : at + _SLICE_BYTES]
            at += len(more)
            while not decoder.eof:
                chunk = decoder.decompress(more, _STEP_BYTES)
                yield chunk
                more = decoder.unconsumed_tail
                if not more and len(chunk) < _STEP_BYTES:  # a full chunk: the decoder may hold more
                    break
        at -= len(decoder.unused_data)


def _gunzipped(text: bytes) -> _Steps:
    return _inflated(text, 16 + zlib.MAX_WBITS)


def _deflated(text: bytes) -> _Steps:
    """Inflate `text`: with a zlib header, as RFC 9110 requires, or without it, as many clients send."""
    has_head = len(text) >= 2 and text[0] & 15 == 8 and int.from_bytes(text[:2], "big") % 31 == 0
    return _inflated(text, zlib.MAX_WBITS if has_head else -zlib.MAX_WBITS)


def _unbrotlied(text: bytes) -> _Steps:
    decoder = brotli.Decompressor()
    for at in range(0, len(text), _SLICE_BYTES):
        yield decoder.process(text[at : at + _SLICE_BYTES], output_buffer_limit=_STEP_BYTES)
        while not decoder.can_accept_more_data():
            yield decoder.process(b"", output_buffer_limit=_STEP_BYTES)
    if not decoder.is_finished():
        raise EOFError("it is cut off")


def _unzstandarded(text: bytes) -> _Steps:
    at = parts = 0
    while at < len(text):
        parts += 1
        if parts > _MOST_PARTS:
            raise EOFError(f"more than {_MOST_PARTS} frames")
        decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()
        while not decoder.eof:
            if at >= len(text):
                raise EOFError("it is cut off")
            more = text[at : at + _ZSTD_SLICE_BYTES]
            at += len(more)
            yield decoder.decompress(more)
        at -= len(decoder.unused_data)


_DECODERS: Final[dict[str, Callable[[bytes], _Steps]]] = {
    "gzip": _gunzipped,
    "x-gzip": _gunzipped,
    "deflate": _deflated,
    "br": _unbrotlied,
    "zstd": _unzstandarded,
}


def as_utf8(text: bytes) -> bytes:
    """JSON `text` converted from UTF-16 or UTF-32 to UTF-8, without its byte order mark and trailing NULs
    (which engines accept); `text` itself if it cannot be decoded, or has too many lone surrogates."""
    encoding = json.detect_encoding(text)
    if encoding not in ("utf-8", "utf-8-sig"):
        decoder, parts, halved = codecs.getincrementaldecoder(encoding)("surrogatepass"), [], 0
        try:
            for at in range(0, len(text), _HALVES_SLICE_BYTES):
                part = decoder.decode(text[at : at + _HALVES_SLICE_BYTES])
                try:
                    parts.append(part.encode())
                except UnicodeEncodeError:
                    parts.append(part.encode("utf-8", "surrogatepass"))
                    halved += 1
                if halved > _MOST_HALVED_SLICES:
                    return text
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return text
        text = b"".join(parts)
    return text.removeprefix(b"\xef\xbb\xbf").rstrip(b"\0")


class OtherBody:
    """A body that is not JSON. `at` is the byte range of the model's name in a form; None without a model."""

    def __init__(self, text: bytes, at: tuple[int, int] | None = None, *, is_quoted: bool = False) -> None:
        self.text, self._at, self._is_quoted = text, at, is_quoted

    @property
    def values(self) -> Mapping[str, memoryview]:
        """Returns nothing: the picker can read no prompt in a body that is not JSON."""
        return {}

    def with_model(self, name: bytes) -> bytes:
        """The body with its model replaced by the JSON text `name`; all other bytes stay the same.

        Raises:
            Unsupported: the body names no model.
        """
        target: str = json.loads(name)
        if self._at is None:
            raise Unsupported(f"the request cannot be sent as model {target}: its body does not name one")
        start, end = self._at
        return b"".join(
            (self.text[:start], (quote_plus(target) if self._is_quoted else target).encode(), self.text[end:])
        )


class Form(NamedTuple):
    """A form's fields `model` and `stream`, '' if missing, and the byte ranges of the form's files."""

    model: str
    stream: str
    files: tuple[tuple[int, int], ...]
    body: OtherBody


def is_form(content_type: bytes) -> bool:
    return content_type[:20].lower().startswith((b"multipart/form-data", b"application/x-www-fo"))


def read_form(text: bytes, content_type: bytes) -> Form:
    """Parse a form, multipart or urlencoded by its `content_type`.

    Raises:
        BadRequest: the form is malformed, or has `model` or `stream` twice.
    """
    is_multipart = content_type[:9].lower() == b"multipart"
    parts = _multipart(text, content_type) if is_multipart else _urlencoded(text)
    found: dict[str, tuple[int, int]] = {}
    files: list[tuple[int, int]] = []
    for count, (name, start, end, is_file) in enumerate(parts):
        if count >= _MAX_FIELDS:
            raise BadRequest(f"the form has more than {_MAX_FIELDS} fields")
        if is_file:
            files.append((start, end))
        if name in ("model", "stream"):
            if name in found:
                raise BadRequest(f"the form has {name} twice")
            found[name] = start, end
    values = {}
    for name, (start, end) in found.items():
        if end - start > _MAX_MODEL_BYTES:
            raise BadRequest(f"the form's {name} is too long")
        try:
            value = text[start:end].decode()
        except UnicodeDecodeError:
            raise BadRequest(f"the form's {name} is not valid UTF-8") from None
        values[name] = value if is_multipart else unquote_plus(value)
    body = OtherBody(text, found.get("model"), is_quoted=not is_multipart)
    return Form(values.get("model", ""), values.get("stream", ""), tuple(files), body)


def _multipart(text: bytes, content_type: bytes) -> Iterator[tuple[str, int, int, bool]]:
    """The name of each part, where its content starts and ends, and whether the part is a file (RFC 7578)."""
    boundaries = _BOUNDARY.findall(content_type)
    if len(boundaries) != 1:
        raise BadRequest("the content-type multipart/form-data needs one boundary")
    mark = b"--" + (boundaries[0][0] or boundaries[0][1])
    at = 0 if text.startswith(mark) else text.find(b"\r\n" + mark) + 2
    if at == 1:
        raise BadRequest("the form has no part: its boundary does not occur")
    at += len(mark)
    heads_bytes = 0
    while not text.startswith(b"--", at):
        head = text.find(b"\r\n", at, at + 64)
        if head < 0 or text[at:head].strip(b" \t"):
            raise BadRequest("the form is malformed after a boundary")
        if text.startswith(b"\r\n", head + 2):
            start = head + 4
        else:
            start = text.find(b"\r\n\r\n", head, head + _MAX_FIELD_HEAD) + 4
        end = text.find(b"\r\n" + mark, start - 2)
        if start < 4 or end < 0:
            raise BadRequest("the form is cut off")
        heads_bytes += start - head
        if heads_bytes > _MAX_FIELD_HEADS:
            raise BadRequest(f"the headers of the form's fields are longer than {_MAX_FIELD_HEADS} bytes")
        name, is_file = _named(text[head : start - 2])
        yield name, start, max(start, end), is_file
        at = end + 2 + len(mark)


def _named(head: bytes) -> tuple[str, bool]:
    """The name of a part, from its headers `head`, and whether the part is a file."""
    dispositions = _DISPOSITION.findall(head)
    if len(dispositions) != 1:
        raise BadRequest("a part of the form needs one content-disposition")
    parameters = [(key.lower(), quoted or bare) for key, quoted, bare in _PARAMETER.findall(dispositions[0])]
    names = [value for key, value in parameters if key == b"name"]
    # Servers disagree about parts with several names and about names encoded by RFC 2231.
    if len(names) != 1 or any(key.startswith(b"name*") for key, _ in parameters):
        raise BadRequest("a part of the form needs one name")
    return names[0].decode("latin-1"), any(key.startswith(b"filename") for key, _ in parameters)


def _urlencoded(text: bytes) -> Iterator[tuple[str, int, int, bool]]:
    at = 0
    while at < len(text):
        end = text.find(b"&", at)
        end = len(text) if end < 0 else end
        equals = text.find(b"=", at, end)
        name = text[at : equals if equals >= 0 else end][:256]
        yield unquote_plus(name.decode("latin-1")), equals + 1 if equals >= 0 else end, end, False
        at = end + 1
