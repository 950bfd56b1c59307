"""Reads and builds ext_proc messages (docs/specification.md, 002). exchange.py calls this module.

Answers are bytes. The answers to requests are assembled field by field from cached pieces (`_field`): this
takes a fifth of the time that protobuf takes to build and serialise a message. Tests parse the answers.

The first message's `protocol_config` says which parts of a request and its response Envoy sends:

request body           response body          mode
FULL_DUPLEX_STREAMED   FULL_DUPLEX_STREAMED   standard (also if Envoy says nothing)
FULL_DUPLEX_STREAMED   NONE                   lean
NONE                   NONE                   lean, for session requests: headers only
"""

import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from picker_fleet.domain.allowlist import DESTINATION
from picker_fleet.domain.errors import Unsupported
from picker_fleet.domain.request import Placement
from picker_fleet.ingress import quota_headers
from picker_fleet.ingress.context import PRESSURES, Refusal

TEST_SERVED = "x-conformance-test-served-endpoint"
# The project's configuration of Envoy copies this header to content-length.
LENGTH_HEADER: Final = "x-picker-content-length"

# In mode `standard`, a filter sends this attribute to say that Envoy replaces the x-request-id of clients.
ID_ATTRIBUTE: Final = "request.id"
SUBSET_HINT = "envoy.lb.subset_hint"  # the metadata namespace of `SUBSET`
# Namespace of the picker's metadata. In the access log Envoy returns {id, token}, and for a queued request
# {waited, target}. Envoy sends {session, pressure} and the headers about tenants' limits to the client.
PICKER = "picker"

CHUNK_BYTES = 62_000  # Envoy's limit, in bytes, of one body chunk in an ext_proc answer
WHOLE_BYTES = 512 * 1024  # `lean` sends no larger body in one message: half of Envoy's default buffer
_OVERWRITE = 2  # HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD

HEADERS_ALONE: Final = "headers alone"  # mode `lean` for session requests, whose bodies the picker never sees
_NONE = ProcessingMode.NONE
_DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
_MODES = {(_DUPLEX, _DUPLEX): "standard", (_DUPLEX, _NONE): "lean", (_NONE, _NONE): HEADERS_ALONE}

_MOST_LISTED = 4096  # read at most this many entries of a list in metadata
_NOTHING: Mapping[str, str] = MappingProxyType({})
_BODIES = (b"\x22", b"\x2a")  # tags of the fields `request_body` and `response_body`
REQUEST_TRAILERS: Final = b"\x2a\x00"  # an answer with an empty field `request_trailers`
RESPONSE_TRAILERS: Final = b"\x32\x00"  # an answer with an empty field `response_trailers`


def mode_of(message: ProcessingRequest) -> str:
    """The picker's mode (`standard` or `lean`) that Envoy's `protocol_config` asks for.

    Raises:
        Unsupported: the body modes fit neither `standard` nor `lean`.
    """
    if not message.HasField("protocol_config"):
        return "standard"
    config = message.protocol_config
    request, response = config.request_body_mode, config.response_body_mode
    mode = _MODES.get((request, response))
    if mode is None:
        names = {number: name for name, number in ProcessingMode.BodySendMode.items()}
        asked, answered = names.get(request, request), names.get(response, response)
        raise Unsupported(
            f"request_body_mode {asked} with response_body_mode {answered} is not supported; "
            "use FULL_DUPLEX_STREAMED for both, or NONE for the response"
        )
    return mode


def bytes_beside_body(data: bytes) -> int:
    """The bytes of an encoded ProcessingRequest, less the length of the body with which it begins, if any."""
    body_bytes = 0
    if data[:1] in _BODIES:
        for number, byte in enumerate(data[1:6]):
            body_bytes |= (byte & 127) << 7 * number
            if byte < 128:
                break
    return len(data) - body_bytes


def read_headers(message: Any, wanted: Collection[str]) -> dict[str, bytes]:
    """The raw first value of each header in an HttpHeaders whose name is in `wanted` (lower case)."""
    found: dict[str, bytes] = {}
    for field in message.headers.headers:
        name = field.key
        if name not in wanted and (name := name.lower()) not in wanted:  # Envoy itself sends lower-case names
            continue
        if name not in found:
            found[name] = field.raw_value or field.value.encode()
    return found


def read_metadata(message: Any, namespace: str, key: str) -> Any:
    """The value of `key` in a namespace of a ProcessingRequest's filter metadata; None if it is missing.

    Numbers become floats; a list becomes a list of its first `_MOST_LISTED` entries; a null, a structure or a
    list in a list becomes ''.
    """
    struct = message.metadata_context.filter_metadata.get(namespace)
    value = None if struct is None else struct.fields.get(key)
    return None if value is None else _plain(value)


def has_id_attribute(message: Any) -> bool:
    """Whether a ProcessingRequest has the attribute `ID_ATTRIBUTE`."""
    return any(ID_ATTRIBUTE in struct.fields for struct in message.attributes.values())


@lru_cache(maxsize=4096)
def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _field(tag: bytes, data: bytes) -> bytes:
    """Encode a protobuf field of wire type LEN (a string, bytes or message); `tag` is its encoded tag."""
    return tag + _varint(len(data)) + data


def _entry(key: str, value: bytes) -> bytes:
    """Encode one field of a Struct: the map entry of `key` with the encoded Value `value`."""
    return _field(b"\x0a", _field(b"\x0a", key.encode()) + _field(b"\x12", value))


def _opening(length: int, *fields: tuple[bytes, bytes]) -> bytes:
    """The bytes that precede `length` bytes of data within nested `fields`, innermost first.

    Each field is a tuple: the encoded fields that precede it in its message, and its tag.
    """
    head = b""
    for before, tag in fields:
        head = before + tag + _varint(len(head) + length) + head
    return head


def _text(key: str) -> Callable[[str], bytes]:
    """Returns a function that encodes a Struct's field `key` with a string value."""
    opening = lru_cache(maxsize=512)(partial(_text_opening, key))

    def entry(value: str) -> bytes:
        data = value.encode()
        return opening(len(data)) + data

    return entry


def _text_opening(key: str, length: int) -> bytes:
    """The bytes that precede a value of `length` bytes in a Struct's field `key`."""
    return _opening(length, (b"", b"\x1a"), (_field(b"\x0a", key.encode()), b"\x12"), (b"", b"\x0a"))


_ID, _TOKEN, _SESSION, _TARGET = map(_text, ("id", "token", "session", "target"))
# Maps a header to the bytes that precede its value in a Struct, by the value's length. Each length is below
# 128 and so takes one byte, an ASCII character: all headers of an answer can be encoded as one text.
_QUOTA_OPENINGS: Final = {
    name: [_text_opening(name, length).decode("ascii") for length in range(quota_headers.LONGEST + 1)]
    for name in quota_headers.NAMES
}
_PRESSURE_ENTRIES: Final = {value: _text("pressure")(value) for value in PRESSURES}
_PICKER_KEY = _field(b"\x0a", PICKER.encode())
_CLEAR_ROUTE_CACHE = b"\x28\x01"  # CommonResponse.clear_route_cache: true
_DOUBLE = struct.Struct("<d").pack


class Placed(NamedTuple):
    """The answer for a placed request: the encoded HeaderMutation and the encoded dynamic metadata."""

    set_headers: bytes
    metadata: bytes

    def message(self) -> bytes:
        return _headers_alone(self.set_headers) + self.metadata

    def with_body(self, body: bytes) -> bytes:
        """The answer with the request's whole body (CONTINUE_AND_REPLACE), which needs no further message.

        Envoy buffers the whole body (hence `WHOLE_BYTES`), and forwards the body without a content-length.
        """
        before = b"\x0a" + _varint(len(body))  # BodyMutation.body
        mutation = b"\x1a" + _varint(len(before) + len(body)) + before
        status = b"\x08\x01"
        head = status + _field(b"\x12", self.set_headers) + _CLEAR_ROUTE_CACHE + mutation
        common = b"\x0a" + _varint(len(head) + len(body)) + head
        return b"".join((b"\x0a", _varint(len(common) + len(body)), common, body, self.metadata))


@lru_cache(maxsize=1024)
def _headers_alone(set_headers: bytes) -> bytes:
    """The answer to request headers with the header mutation `set_headers` and without a body mutation."""
    return _field(b"\x0a", _field(b"\x0a", _field(b"\x12", set_headers) + _CLEAR_ROUTE_CACHE))


def placed(
    placement: Placement,
    destinations: str,
    request_id: str,
    content_length: int | None,
    target_model: str = "",
    *,
    namespace: str,
    pressure: str,
    quota: Mapping[str, str] = _NOTHING,
    removes: str = "",
    is_our_envoy: bool = False,
    stages: tuple[tuple[str, str], ...] = (),
) -> Placed:
    """The answer to request headers that names `destinations` in a header and in the metadata `namespace`.

    `request_id` is '' if the access log need not report the request; `content_length` is None to keep that
    header; `target_model` is the model name sent upstream; `pressure` is the value of x-queue-pressure for
    the client; `quota` has the client's headers about limits of tenants; `removes` is a header not sent
    upstream. `is_our_envoy`: Envoy restores the content-length from `LENGTH_HEADER`. `stages` are headers for
    the server that decodes, with their values; the value '' removes the client's header.
    """
    set_headers, destination = _towards(destinations, namespace)
    set_headers += _stage_headers(stages)
    if content_length is not None:
        for name in ("content-length", LENGTH_HEADER) if is_our_envoy else ("content-length",):
            set_headers += _set_header(name, str(content_length))
        set_headers += _PLAIN_ANSWER
    if removes:
        set_headers += _remove_header(removes)
    account = _PRESSURE_ENTRIES[pressure]
    if quota:
        text = ""
        for name, value in quota.items():
            text += _QUOTA_OPENINGS[name][len(value)] + value
        account += text.encode()
    if request_id:
        account += _ID(request_id) + _TOKEN(placement.accounting_token)
        if placement.session:
            account += _SESSION(placement.session)
        if placement.waited_s is not None:
            account += _entry("waited", b"\x11" + _DOUBLE(placement.waited_s)) + _TARGET(target_model)
    picker = _account_opening(len(account))
    size = _varint(len(destination) + len(picker) + len(account))
    return Placed(set_headers, b"".join((b"\x42", size, destination, picker, account)))


@lru_cache(maxsize=1024)
def _account_opening(length: int) -> bytes:
    """The encoded bytes that precede `length` bytes of fields in the metadata namespace `picker`."""
    return _opening(length, (b"", b"\x2a"), (_PICKER_KEY, b"\x12"), (b"", b"\x0a"))


@lru_cache(maxsize=1024)
def _towards(destination: str, namespace: str) -> tuple[bytes, bytes]:
    """The encoded header mutation and metadata entry that name the endpoints in `destination`."""
    fields = _text(DESTINATION)(destination)
    return _set_header(DESTINATION, destination), _entry(namespace, _field(b"\x2a", fields))


@lru_cache(maxsize=1024)
def _stage_headers(stages: tuple[tuple[str, str], ...]) -> bytes:
    return b"".join(_set_header(name, value) if value else _remove_header(name) for name, value in stages)


@lru_cache(maxsize=1024)
def _set_header(key: str, value: str) -> bytes:
    """A HeaderMutation entry that sets header `key` to `value`, replacing any former value."""
    header = _field(b"\x0a", key.encode()) + _field(b"\x1a", value.encode())
    return _field(b"\x0a", _field(b"\x0a", header) + bytes((0x18, _OVERWRITE)))


@lru_cache(maxsize=64)
def _remove_header(key: str) -> bytes:
    """A HeaderMutation entry that removes header `key`."""
    return _field(b"\x12", key.encode())


# Removes accept-encoding, since the client's model name can be restored only in an uncompressed answer.
_PLAIN_ANSWER = _field(b"\x12", b"accept-encoding")


def request_body(body: bytes) -> Iterator[bytes]:
    """The answers that carry the request body in chunks, built lazily; the last one ends the request."""
    last = max(len(body) - 1, 0) // CHUNK_BYTES * CHUNK_BYTES
    for start in range(0, last + 1, CHUNK_BYTES):
        chunk = body[start : start + CHUNK_BYTES] if last else body
        yield _streamed(b"\x1a", chunk, start == last)


def streamed_request(body: bytes, *, ended: bool) -> bytes:
    """Pass on one chunk of the body of a session request, which was placed by its headers alone."""
    return _streamed(b"\x1a", body, ended)


def response_body(body: bytes, *, ended: bool) -> bytes:
    """Pass on one chunk of the model server's response."""
    return _streamed(b"\x22", body, ended)


def _streamed(part: bytes, chunk: bytes, ended: bool) -> bytes:
    """A chunk of a body as a StreamedBodyResponse; `part` is the tag of the message's body field."""
    return _before_chunk(part, len(chunk), ended) + chunk + (b"\x10\x01" if ended else b"")


@lru_cache(maxsize=4096)
def _before_chunk(part: bytes, length: int, ended: bool) -> bytes:
    """The bytes that precede a chunk of `length` bytes: the tags and lengths of the enclosing messages."""
    head = b"\x0a" + _varint(length)
    for tag in (b"\x1a", b"\x1a", b"\x0a", part):
        head = tag + _varint(len(head) + length + (2 if ended else 0)) + head
    return head


def response_headers(added: Mapping[str, str], *, removed: Iterable[str] = (), sized: bool) -> bytes:
    """Pass on a model server's response headers without `removed`, plus the non-empty headers in `added`.

    Unless `sized`, the content-length is removed, since the body's length will change.
    """
    mutation = b"".join(_set_header(name, value) for name, value in added.items() if value)
    mutation += b"".join(map(_remove_header, removed if sized else (*removed, "content-length")))
    return _passed_on(mutation)


@lru_cache(maxsize=1024)
def _passed_on(mutation: bytes) -> bytes:
    """The answer to response headers, with the encoded HeaderMutation `mutation`."""
    return _field(b"\x12", _field(b"\x0a", _field(b"\x12", mutation) if mutation else b""))


def refused(refusal: Refusal, code: str) -> bytes:
    """The ext_proc message that carries `refusal`; `code` is the error code."""
    answer = ProcessingResponse()
    immediate = answer.immediate_response
    immediate.status.code = refusal.status
    immediate.details = f"picker_{code}"
    immediate.body = refusal.body
    for key, value in refusal.headers.items():
        option = immediate.headers.set_headers.add(append_action=_OVERWRITE)
        option.header.key, option.header.raw_value = key, value.encode()
    data: bytes = answer.SerializeToString()
    return data


def parts_of(message: ProcessingRequest) -> int:
    """The number of headers and attributes in a ProcessingRequest."""
    headers = len(message.request_headers.headers.headers) + len(message.response_headers.headers.headers)
    return headers + len(message.attributes)


def _plain(value: Any, *, may_list: bool = True) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "list_value" and may_list:
        return [_plain(entry, may_list=False) for entry in islice(value.list_value.values, _MOST_LISTED)]
    if kind in ("string_value", "number_value", "bool_value"):
        return getattr(value, kind)
    return ""
