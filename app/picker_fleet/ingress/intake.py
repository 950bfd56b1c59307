"""Turns headers and a body into an `InferenceRequest`. Pure: ids and random numbers are injected.

Called for each request. docs/protocol.md lists the headers; both spellings of a header count, the gateway's
first. A malformed body or header raises a `BadRequest` that names it (G10). Only a malformed workload context
is accepted: it makes an anonymous workload of criticality 3 (docs/specification.md).
"""

import enum
import math
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypedDict

import msgspec
import orjson
from xxhash import xxh3_64_hexdigest

from picker_fleet.domain import allowlist
from picker_fleet.domain.allowlist import FAIRNESS_ID, OBJECTIVE, REWRITE, Way
from picker_fleet.domain.bands import Band, Bands, Criticality
from picker_fleet.domain.config import Settings
from picker_fleet.domain.errors import BadRequest
from picker_fleet.domain.request import KEY_MARK, InferenceRequest, Workload, finite_number
from picker_fleet.domain.sections import Model, Objective
from picker_fleet.domain.units import duration_s, endpoint_address, has_control
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.ingress import cost
from picker_fleet.ingress.bodies import OtherBody, as_utf8, is_form, read_form
from picker_fleet.ingress.traffic_split import Split, identity_of_body
from picker_fleet.scheduling.chooser import SESSION_HEADER as SESSION
from picker_fleet.scheduling.chooser import session_token_of
from picker_fleet.scheduling.endpoint_history import PROMPT_MEMBERS, block_hashes, prompt_bytes
from picker_fleet.state.accounting_token import Keyring

METHOD, PATH = ":method", ":path"
REQUEST_ID = "x-request-id"
CONTENT_LENGTH = "content-length"
CONTENT_TYPE, CONTENT_ENCODING = "content-type", "content-encoding"
_OF_BODY = (CONTENT_LENGTH, CONTENT_TYPE, CONTENT_ENCODING)
FORWARDED_FOR = "x-forwarded-for"
TTL = ("x-llm-d-inference-ttl",)
# Headers with a client's own deadline. ROUTE_TIMEOUT is set by another Envoy before this one; an Envoy
# passes it on only from internal peers.
REQUEST_TIMEOUT = "x-request-timeout"
GRPC_TIMEOUT = "grpc-timeout"
ROUTE_TIMEOUT = "x-envoy-expected-rq-timeout-ms"
DEADLINES = (REQUEST_TIMEOUT, GRPC_TIMEOUT, ROUTE_TIMEOUT)
WORKLOAD = ("x-workload-context",)
SESSION_HEADERS = frozenset(("session-id", "x-session-affinity"))
TRACE = "traceparent"
TEST_SELECTION = "test-epp-endpoint-selection"  # sent by the conformance suite
HEADERS = frozenset(
    (METHOD, PATH, FORWARDED_FOR, REQUEST_ID, *WORKLOAD, *TTL, *DEADLINES, SESSION, *_OF_BODY)
)
_PLAIN = frozenset((REQUEST_ID, *_OF_BODY))  # headers that set no field of a request
_NAMES = frozenset((*FAIRNESS_ID, *OBJECTIVE, *REWRITE))
_TIMES = frozenset((*TTL, *DEADLINES))

MAX_NAME_BYTES = 256  # length of a model name, objective or fairness id
MAX_WORKLOAD_ID_BYTES = 128
_SHORT_CONTEXT = 512  # characters; longer workload contexts are not cached
_MAX_MODEL_SETTINGS = 1000  # cached pairs of model and objective
DEFAULT_CRITICALITY = 3
_ANONYMOUS = Workload("", DEFAULT_CRITICALITY)
_MIN_TTL_S = 0.001

_FILE_BYTES_A_TEXT_BYTE = 250  # a token is about 1000 bytes of audio, or 4 bytes of text

# The longest JSON text of a name: every byte as a `\u` escape, within quotes.
_LONGEST_NAME = 6 * MAX_NAME_BYTES + 2
_QUOTE = ord('"')
_SALT_BYTES = 1024

MODEL = "model"
UNNAMED = "unnamed"  # the model of a request that needs no model
_NO_NAMES = (b"null", b'""')
_JSON_TYPE = b"application/json"
# Content types under which clients send JSON, curl's default among them; servers may read it as JSON or not.
_JSON_TYPES = re.compile(
    rb"$|application/(?:[a-z.]+\+)?json|text/|application/x-www-form-urlencoded", re.IGNORECASE
)
# A `\u` escape of a lone surrogate, which Python's JSON reader and others accept. Escaped backslashes must be
# removed from the text before the match.
_HALF_PAIR = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|[c-fC-F][0-9a-fA-F]{2}(?<!\\u[dD][89abAB]..\\u[dD][c-fC-F]..))",
    re.DOTALL,
)
_MOST_HALF_PAIRS = 64
_OBJECT, _ARRAY = re.compile(rb"[ \t\r\n]*\{"), re.compile(rb"[ \t\r\n]*\[")
MAX_KEYS = 256  # in the outermost object; the OpenAI API defines about fifty
MAX_KEY_CHARS = 256

_BACKSLASH = ord("\\")
_FEW_MARKS = 32  # quotation marks that are examined in any body
_BYTES_A_MARK = 512  # the least average distance of further quotation marks that are examined
_PLACEHOLDER = b"x" * (_LONGEST_NAME + 1)  # replaces a long string; no valid name is so long
_SMALL_BYTES = 4096  # decode only smaller bodies whole: objects may take thirty times as much memory
_MOST_KEY_CHARS = 512  # length of a session key, or of the id of a response or conversation
_ASCII_ONLY = bytes(range(128)) + b"?" * 128
_KEY = re.compile(rb'[ \t\n\r]*[{,][ \t\n\r]*"[^"\\]*(?:\\.[^"\\]*)*"[ \t\n\r]*:[ \t\n\r]*')

_USED = frozenset((
    MODEL, "stream", *cost.MAX_ANSWER, *PROMPT_MEMBERS, "cache_salt",
))  # fmt: skip

_ANYWHERE: Mapping[str, str] = {}
_NO_MEMBERS: cost.Members = {}

_GRPC_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")  # the gRPC protocol's TimeoutValue and TimeoutUnit
_GRPC_UNIT_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_WHOLE_MS = re.compile(r"[0-9]{1,15}")

# Length of a body's hexadecimal digest. It need not resist attackers: they know neither digest nor body.
_DIGEST_CHARS = 12
_TRUSTED_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class Ask(NamedTuple):
    """The model, stream flag, size and state ids that a request's body gives.

    `model` is '' if the body names none; `needs_model` is False for a path of no known API. `read` is the
    parsed body, or the bytes of a simple body (`_simple_members`), whose `members` are decoded. `body_bytes`
    counts the whole body, `file_bytes` its files. `refers` are the ids of state that the request continues.
    """

    model: str
    stream: bool
    read: "Body | OtherBody | bytes"
    body_bytes: int = 0
    members: cost.Members = _NO_MEMBERS
    file_bytes: int = 0
    needs_model: bool = True
    refers: tuple[str, ...] = ()

    @property
    def body(self) -> "Body | OtherBody":
        return Body(self.read) if isinstance(self.read, bytes) else self.read

    @property
    def text(self) -> bytes:
        """The body's bytes; empty for a request admitted without its body."""
        return self.read or b"" if self.read is None or isinstance(self.read, bytes) else self.read.text

    def renamed(self, target: str) -> bytes:
        """The body with its model replaced by `target` and all other bytes unchanged."""
        return self.body.with_model(orjson.dumps(target))


_JSON = Way("inference")


def read_body(text: bytes, way: Way = _JSON, content_type: bytes = b"") -> Ask:
    """Parse the decoded body of a request whose path is served by `way`.

    The body must be a JSON object that names its model, unless `way` says that the model is elsewhere, or
    `content_type` says that the body is not JSON.

    Raises:
        BadRequest: the body is empty, not JSON, has a used key twice, or its model is unusable.
    """
    if content_type and content_type != _JSON_TYPE:
        is_multipart = content_type[:9].lower() == b"multipart"
        if is_multipart or (way.source == "form" and is_form(content_type)):
            form = read_form(text, content_type)
            model = _model(form.model) if form.model else way.model
            is_stream = form.stream.lower() in ("true", "1")
            return Ask(model, is_stream, form.body, len(text), file_bytes=form.file_bytes)
    try:
        ask = _read_object(text)
    except BadRequest as fault:
        ask = _read_otherwise(text, way, content_type, fault)
    if way.has_state:
        ask = ask._replace(refers=_refers(ask.members))
    if way.model and (way.source == "path" or not ask.model):
        ask = ask._replace(model=_model(way.model))
    return ask if way.is_known else ask._replace(needs_model=False)


def _refers(members: cost.Members) -> tuple[str, ...]:
    """The ids of the response and conversation that a request continues (`conversation` may be an object)."""
    found = (_text_at(members, path) for path in ("previous_response_id", "conversation", "conversation.id"))
    return tuple(filter(None, found))


def _text_at(members: cost.Members, path: str) -> str:
    """The string of at most `_MOST_KEY_CHARS` at `path` (`member` or `member.inner`); '' if there is none.
    Each member is decoded, or a JSON text."""
    name, _, inner = path.partition(".")
    value: Any = members.get(name, "")
    if not isinstance(value, str | dict):
        try:
            value = orjson.loads(memoryview(value)) if len(value) <= _SMALL_BYTES else ""
        except (TypeError, orjson.JSONDecodeError):
            return ""
    if inner:
        value = value.get(inner) if isinstance(value, dict) else ""
    return value if isinstance(value, str) and len(value) <= _MOST_KEY_CHARS else ""


def bodiless(way: Way) -> Ask:
    """The `Ask` of a request that is admitted without a body."""
    return Ask(_model(way.model) if way.model else "", True, OtherBody(b""), needs_model=way.is_known)


def _read_otherwise(text: bytes, way: Way, content_type: bytes, fault: BadRequest) -> Ask:
    """Parse a body that is not a JSON object in UTF-8; raise `fault` unless its model may be elsewhere.
    A body that a server could read as an object is read as one: the server could take its model from it."""
    plain = as_utf8(text)
    whole = _without_half_pairs(plain)
    if whole != text:
        try:
            ask = _read_object(whole)
        except BadRequest as other:
            text, fault = plain, other
        else:
            if whole == plain:
                return ask
            if "\ufffd" in ask.model:
                raise fault
            body = ask.body
            assert body.values is not None
            body.text = plain
            return ask._replace(read=body)
    if way.source != "path" and (_OBJECT.match(text) or (not text and way.is_known)):
        raise fault
    if way.source != "path" and way.is_known and _JSON_TYPES.match(content_type):
        if not _ARRAY.match(text):
            raise fault
        _check_json(text)
    return Ask("", False, OtherBody(text), len(text))


def _without_half_pairs(text: bytes) -> bytes:
    """JSON `text` with at most `_MOST_HALF_PAIRS` lone surrogates replaced by U+FFFD; as long as before."""
    if b"\\u" not in text or b"\0" in text:
        return text
    plain = text.replace(rb"\\", b"\0\0")
    return _HALF_PAIR.sub(rb"\\ufffd", plain, _MOST_HALF_PAIRS).replace(b"\0\0", rb"\\")


def _check_json(text: bytes) -> None:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as malformed:
        raise BadRequest(f"the body is not valid JSON: {malformed}") from None
    except RecursionError:
        raise BadRequest("the body is not valid JSON: it is nested too deeply") from None


def _read_object(text: bytes) -> Ask:
    """Parse a body that is a JSON object.

    Raises:
        BadRequest: the body is empty, no JSON object, has a used key twice, or its model is unusable.
    """
    short = _without_long_strings(text)
    members = _simple_members(short)
    if members is not None:
        asks_stream = members.get("stream") is True
        name = members.get(MODEL)
        model = "" if name is None or name == "" else _model(name)
        return Ask(model, asks_stream, text, len(text), members)
    body = Body(text)
    try:
        values = (body if short is text else Body(short)).values
    except BadRequest:
        values = body.values  # raises an error with the position in the whole body
    member = values.get(MODEL)
    model = (
        "" if member is None or bytes(memoryview(member)[:5]) in _NO_NAMES else _model_of(memoryview(member))
    )
    asks_stream = "stream" in values and bytes(memoryview(values["stream"])[:5]) == b"true"
    return Ask(model, asks_stream, body, len(text), values)


def read_subset(hint: object) -> tuple[str, ...]:
    """Endpoints (`ip:port`, canonical) of a subset hint: a list or a comma-separated string.

    Entries that are no addresses are left out; a hint of another type gives no endpoints.
    """
    entries = hint.split(",") if isinstance(hint, str) else hint if isinstance(hint, list | tuple) else ()
    found: list[str] = []
    for entry in entries:
        with suppress(ValueError):
            found.append(_canonical(str(entry).strip()))
    return tuple(found)


# A gateway's hints repeat the same endpoints, hundreds in each request.
_canonical = lru_cache(maxsize=10_000)(endpoint_address)


def selected_endpoints(endpoints: SnapshotCell, choice: bytes) -> tuple[str, ...]:
    """The endpoints that the conformance suite's header selects: `ip:port`, or an `ip` of `endpoints`."""
    parts = [part.strip() for part in choice.decode(errors="replace").split(",")]
    by_host: dict[str, list[str]] = {}
    for address in (each.address for each in endpoints.current.endpoints):
        by_host.setdefault(address.rpartition(":")[0].strip("[]"), []).append(address)
    found = [address for part in parts for address in by_host.get(part.strip("[]"), ())]
    return tuple(dict.fromkeys((*found, *read_subset(parts))))


def wanted_headers(settings: Settings) -> frozenset[str]:
    """The lower-case names of the headers that the picker reads under `settings`."""
    traces = {TRACE} if settings.tracing.enabled else frozenset()
    tests = {TEST_SELECTION} if settings.extproc.conformance else frozenset()
    keys = {key for key in settings.scheduling.session_keys if key in SESSION_HEADERS}
    return HEADERS | allowlist.trusted(settings.extproc.trusted_headers) | keys | traces | tests


class PrefixReader(Protocol):
    """The part of the chooser that intake uses."""

    @property
    def needs_prefix_hashes(self) -> bool: ...


class _ModelSettings(NamedTuple):
    """The settings of a model and an objective; `target_model` is '' if the model has several variants."""

    target_model: str
    band: Band
    weight: float
    limit: int
    selector: Mapping[str, str]


class Intake:
    """Makes requests from headers and bodies under one configuration.

    `new_id` makes unique ids (UUIDs); `keys` has the key that chooses variants; `prefixes` says whether a
    scorer reads prompt hashes (None: never); `served_models` lists models that endpoints report.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        new_id: Callable[[], str],
        keys: Keyring,
        prefixes: PrefixReader | None = None,
        served_models: Callable[[], Collection[str]] = tuple,
    ) -> None:
        queue = settings.fair_request_queue
        self.headers = wanted_headers(settings)
        self._bands = queue.bands
        self._unranked = (self._bands.named(Criticality.DEFAULT), 1.0)
        self.new_id, self._keys = new_id, keys
        self._ttl_s = queue.queue_ttl
        self._by_fairness_id = queue.flow_key == "fairness-id"
        self._in_tokens = settings.request_queue_controller.unit == "tokens"
        self._answer_tokens = queue.default_answer_tokens
        self._models = _ranks(settings.models, self._bands)
        self._limits = _limits(settings.models)
        self._longest = {each.name: each.max_model_len for each in settings.models if each.max_model_len}
        self._objective_limits = _limits(settings.objectives)
        self._selectors = {
            model.name: dict(model.endpoint_labels) for model in settings.models if model.endpoint_labels
        }
        self._prefixes = prefixes
        self._session_keys = settings.scheduling.session_keys
        self._default_model = settings.default_model or ""
        self._only_model = settings.models[0].name if len(settings.models) == 1 else ""
        self._served_models = served_models
        self._objectives = _ranks(settings.objectives, self._bands)
        self._targets = {
            model.name: Split.of((entry.name, entry.weight) for entry in model.target_models)
            for model in settings.models
            if model.target_models
        }
        self._configured = self._objectives
        self._rewrites: Mapping[str, Split] = {}
        self._any_rewrite: Split | None = None
        self._model_settings: dict[tuple[str, str], _ModelSettings] = {}  # by model and objective

    def use_live(
        self, priorities: Mapping[str, int], rewrites: Mapping[str, Split], anything: Split | None
    ) -> None:
        """Replace the live objectives and model rewrites.

        A live entry overrides a configured one of the same name; an objective keeps its configured weight.
        `priorities` maps an objective to its priority. `anything` applies to models that `rewrites` lack.
        """
        live = {
            name: (self._bands.of(priority), self._configured.get(name, self._unranked)[1])
            for name, priority in priorities.items()
        }
        self._objectives = {**self._configured, **live}
        self._rewrites, self._any_rewrite = rewrites, anything
        self._model_settings.clear()

    def request(
        self,
        ask: Ask,
        headers: Mapping[str, bytes],
        *,
        subset: tuple[str, ...] | None,
        trusted: bool,
    ) -> InferenceRequest:
        """Make the request from its body `ask` and its `headers` (lower-case names, raw values).

        `trusted` says that Envoy itself set `x-request-id` (`lean`, `http`); otherwise an id is made. Where a
        model has several variants, Envoy's id chooses among them, or else the flow and the body.

        Raises:
            BadRequest: a header that the picker reads is malformed; the message names it.
        """
        raw_id = headers.get(REQUEST_ID, b"") if trusted else b""
        by_gateway = _TRUSTED_ID.fullmatch(raw_id) is not None
        request_id = raw_id.decode() if by_gateway else self.new_id()
        fairness_id = objective = rewrite = session = trace = ""
        workload = _ANONYMOUS
        ttl_s, by_client = self._ttl_s, False
        if not headers.keys() <= _PLAIN:
            if not _NAMES.isdisjoint(headers):
                fairness_id = _name(headers, FAIRNESS_ID)
                objective = _name(headers, OBJECTIVE)
                rewrite = _name(headers, REWRITE)
            if not _TIMES.isdisjoint(headers):
                ttl_s = self._ttl(_text(headers, TTL))
                deadline_s = _deadline_s(headers)
                by_client = deadline_s <= ttl_s
                ttl_s = deadline_s if by_client else ttl_s
            if context := _text(headers, WORKLOAD):
                short = len(context) <= _SHORT_CONTEXT
                workload = _short_context(context) if short else _workload(context)
            session = session_token_of(headers)
            trace = headers.get(TRACE, b"").decode("latin-1")
        if self._session_keys and not session:
            session = self._session_key(headers, ask.members)
        model = rewrite or ask.model or self._model_of_unnamed(ask)
        settings = self._model_settings.get((model, objective)) or self._settings_of(model, objective)
        target, band, weight, limit, selector = settings
        charge, learn = self._cost(ask, model)
        flow = fairness_id if fairness_id and self._by_fairness_id else model
        if not target:
            target = self._variant(model, raw_id if by_gateway else b"", flow, ask)
        prefixes = self._prefixes
        prefix = _prefix(target, ask) if prefixes and prefixes.needs_prefix_hashes else ()
        # Positional arguments: keyword arguments take three times as long.
        return InferenceRequest(
            request_id, model, target, ask.stream, flow, band, weight, workload, charge, ttl_s,
            subset, limit, learn, session, prefix, selector, trace, by_client, ask.body_bytes,
            xxh3_64_hexdigest(ask.text)[:_DIGEST_CHARS], ask.refers,
        )  # fmt: skip

    def session_of(self, headers: Mapping[str, bytes]) -> str:
        """The session of a request whose body the picker does not read."""
        return session_token_of(headers) or self._session_key(headers, _NO_MEMBERS)

    def _session_key(self, headers: Mapping[str, bytes], members: cost.Members) -> str:
        """The first configured session key that the request has, after KEY_MARK; '' without any."""
        for name in self._session_keys:
            if name in SESSION_HEADERS:
                key = headers.get(name, b"")[: _MOST_KEY_CHARS + 1].decode(errors="replace")
            else:
                key = _text_at(members, name)
            if 0 < len(key) <= _MOST_KEY_CHARS:
                return KEY_MARK + key
        return ""

    @property
    def default_model(self) -> str:
        """The model of a request that names none, '' if that is unknown.

        It is the configured default model, or the pool's only model. While a live rewrite applies to any
        model, only the configured default counts.
        """
        if self._default_model or self._any_rewrite is not None:
            return self._default_model
        served = () if self._only_model else self._served_models()
        return next(iter(served)) if len(served) == 1 else self._only_model

    def _model_of_unnamed(self, ask: Ask) -> str:
        model = self.default_model
        if not model and self._any_rewrite is not None:
            model = self._any_rewrite.names[0]
        if not model and not ask.needs_model:
            model = UNNAMED
        if not model:
            raise BadRequest("the request names no model, and the pool has no default one (default_model)")
        return model

    def _cost(self, ask: Ask, model: str) -> tuple[float, bool]:
        """The cost of `ask` in the stock's unit, and whether it lacks the answer's tokens."""
        is_one = isinstance(ask.read, bytes) and _is_one_sequence(ask.members)
        if not self._in_tokens:
            return 1.0 if is_one else float(cost.sequences(ask.members)), False
        most = self._longest.get(model, math.inf)
        size_bytes, default = ask.body_bytes, self._answer_tokens
        if ask.file_bytes:
            size_bytes -= ask.file_bytes - ask.file_bytes // _FILE_BYTES_A_TEXT_BYTE
        return cost.tokens(ask.text, size_bytes, ask.members, most, default, is_one=is_one)

    def _settings_of(self, model: str, objective: str) -> _ModelSettings:
        ranks, name = (self._objectives, objective) if objective else (self._models, model)
        band, weight = ranks.get(name, self._unranked)
        # In flight per flow and endpoint: the lower of the model's and the objective's limit (0: none).
        limits = (self._limits.get(model, 0), self._objective_limits.get(objective, 0) if objective else 0)
        split = self._split_of(model)
        names = (model,) if split is None else split.names
        settings = _ModelSettings(
            target_model=names[0] if len(names) == 1 else "",
            band=band,
            weight=weight,
            limit=min(filter(None, limits), default=0),
            selector=self._selectors.get(model, _ANYWHERE),
        )
        if len(self._model_settings) >= _MAX_MODEL_SETTINGS:
            self._model_settings.clear()
        self._model_settings[model, objective] = settings
        return settings

    def _split_of(self, model: str) -> Split | None:
        """The variants of `model`, by a live rewrite or else as configured; None if it has none."""
        return self._rewrites.get(model, self._any_rewrite) or self._targets.get(model)

    def _variant(self, model: str, gateway_id: bytes, flow: str, ask: Ask) -> str:
        """Choose one of the several variants of `model`. `gateway_id` is empty if the gateway has set no id:
        a client could try ids until one leads to the variant that it wants, and keep that id."""
        split, key = self._split_of(model), self._keys.variant_key
        assert split is not None, "a model without variants has its target in its settings"
        return split.variant(key, gateway_id or identity_of_body(key, flow, ask.text))

    def _ttl(self, text: str) -> float:
        """The TTL in seconds: the header's, at most the configured TTL, which is also the default."""
        return min(max(_duration_s(TTL[0], text), _MIN_TTL_S), self._ttl_s) if text else self._ttl_s


def _deadline_s(headers: Mapping[str, bytes]) -> float:
    """Seconds until the earliest of the client's own deadlines; infinite without any.

    `x-request-timeout` is in seconds or a duration such as `500ms`; `grpc-timeout` has gRPC's format; the
    route timeout is in milliseconds, and 0 means no timeout.

    Raises:
        BadRequest: a header is malformed; the message names it.
    """
    deadline_s = math.inf
    if text := _text(headers, (REQUEST_TIMEOUT,)):
        deadline_s = _duration_s(REQUEST_TIMEOUT, text)
    if text := _text(headers, (GRPC_TIMEOUT,)):
        match = _GRPC_TIMEOUT.fullmatch(text)
        if match is None:
            raise BadRequest(
                f"header {GRPC_TIMEOUT}: {text[:40]!r} is no gRPC timeout: write 500m, 30S or 5M"
            )
        deadline_s = min(deadline_s, int(match[1]) * _GRPC_UNIT_S[match[2]])
    if text := _text(headers, (ROUTE_TIMEOUT,)):
        if not _WHOLE_MS.fullmatch(text):
            raise BadRequest(f"header {ROUTE_TIMEOUT}: {text[:40]!r} is no number of milliseconds")
        deadline_s = min(deadline_s, int(text) / 1000 or math.inf)
    return max(deadline_s, _MIN_TTL_S)


def _duration_s(name: str, text: str) -> float:
    try:
        seconds = duration_s(text)
    except ValueError as fault:
        raise BadRequest(f"header {name}: {fault}") from None
    if seconds <= 0:
        raise BadRequest(f"header {name}: must be above zero")
    return seconds


def _prefix(target_model: str, ask: Ask) -> tuple[bytes, ...]:
    """The hashes of the prompt's blocks; empty for invalid JSON, which the model server refuses."""
    try:
        members = _prompt_decoder.decode(ask.read) if isinstance(ask.read, bytes) else ask.read.values
    except cost.MALFORMED:
        try:
            members = _prompt_decoder.decode(_without_half_pairs(ask.text))
        except cost.MALFORMED:
            return ()
    salt = bytes(memoryview(members["cache_salt"])[:_SALT_BYTES]) if "cache_salt" in members else b""
    return block_hashes(target_model, prompt_bytes(members), salt=salt)


class _PromptMembers(TypedDict, total=False):
    """The members of a simple body (`_simple_members`) that make up its prompt, as JSON texts."""

    tools: msgspec.Raw
    functions: msgspec.Raw
    instructions: msgspec.Raw
    system: msgspec.Raw
    systemInstruction: msgspec.Raw
    messages: msgspec.Raw
    prompt: msgspec.Raw
    input: msgspec.Raw
    contents: msgspec.Raw
    inputs: msgspec.Raw
    cache_salt: msgspec.Raw


_prompt_decoder: msgspec.json.Decoder[Mapping[str, msgspec.Raw]] = msgspec.json.Decoder(_PromptMembers)


def _is_one_sequence(members: cost.Members) -> bool:
    """Whether decoded `members` surely ask for one answer to one prompt; False if `cost` must count them."""
    if not cost.SEVERAL.isdisjoint(members):
        return False
    for name in cost.PROMPTS:
        value = members.get(name)
        if type(value) is list and value and type(value[0]) is not dict:
            return False
    return True


def _workload(text: str) -> Workload:
    """The workload of the header value `text`; an empty or malformed text makes an anonymous workload."""
    context: object = None
    if text:
        try:
            context = orjson.loads(text)
        except orjson.JSONDecodeError:
            context = None
    if not isinstance(context, dict):
        return _ANONYMOUS
    number = finite_number(context.get("criticality"))
    criticality = DEFAULT_CRITICALITY if number is None else int(min(max(number, 1), 5))
    name = context.get("workload_id")
    stripped = name.strip() if isinstance(name, str) else ""
    if not stripped or _too_long(stripped, MAX_WORKLOAD_ID_BYTES) or has_control(stripped):
        return Workload("", criticality)
    return Workload(stripped, criticality)


_short_context = lru_cache(maxsize=4096)(_workload)  # requests of one workload send the same context


def _ranks(entries: Iterable[Model | Objective], bands: Bands) -> dict[str, tuple[Band, float]]:
    return {entry.name: (entry.band(bands), entry.weight) for entry in entries}


def _limits(entries: Iterable[Model | Objective]) -> dict[str, int]:
    return {entry.name: entry.max_inflight_per_endpoint or 0 for entry in entries}


def _model_of(text: memoryview) -> str:
    """The model name of the JSON text `text`, which may have any size."""
    if text[0] != _QUOTE:
        raise BadRequest("the model must be a string")
    if len(text) > _LONGEST_NAME:
        raise BadRequest(f"the model is longer than {MAX_NAME_BYTES} bytes")
    try:
        return _model(orjson.loads(text))
    except orjson.JSONDecodeError as fault:
        raise BadRequest(f"the body is not valid JSON: its model: {fault}") from None


def _model(value: object) -> str:
    if not isinstance(value, str):
        raise BadRequest("the model must be a string")
    short = len(value) <= MAX_NAME_BYTES and value.isascii()
    fault = _fault_of_short(value) if short else _name_fault(value)
    if fault:
        raise BadRequest(f"the model {fault}")
    return value


def _name(headers: Mapping[str, bytes], names: tuple[str, ...]) -> str:
    """The value of the first non-empty header of `names`, checked as a name; '' if all are empty."""
    text = _text(headers, names)
    fault = _name_fault(text) if text else None
    if fault:
        raise BadRequest(f"header {next(name for name in names if headers.get(name))} {fault}")
    return text


def _name_fault(text: str) -> str | None:
    """Why `text` cannot be a name in the shared state; None if it can."""
    if _too_long(text, MAX_NAME_BYTES):
        return f"is longer than {MAX_NAME_BYTES} bytes"
    return _fault_of_short(text)


@lru_cache(maxsize=4096)
def _fault_of_short(text: str) -> str | None:
    """Why a name of valid length is unusable; cached, since requests repeat the same names."""
    if not text.strip():
        return "is empty"
    return "contains a control character" if has_control(text) else None


def _too_long(text: str, limit_bytes: int) -> bool:
    return len(text) > limit_bytes or (not text.isascii() and len(text.encode()) > limit_bytes)


def _text(headers: Mapping[str, bytes], names: tuple[str, ...]) -> str:
    """The value of the first non-empty header of `names`; '' if all are empty."""
    for name in names:
        raw = headers.get(name)
        if raw:
            try:
                return raw.decode()
            except UnicodeDecodeError:
                raise BadRequest(f"header {name} is not valid UTF-8") from None
    return ""


_keys: list[str] = []  # keys of the body being decoded; shared, since decoding never awaits


class _Key(enum.Enum):
    """Enum whose members stand for a body's first, second, … key, whatever the keys' names."""

    __hash__ = object.__hash__  # Enum's own hash would double the time of decoding

    @classmethod
    def _missing_(cls, key: str) -> Any:  # type: ignore[override]
        """The member for the body's next key. Key MAX_KEYS + 1 raises IndexError, which ends the decoding."""
        _keys.append(key)
        return _NTH[len(_keys) - 1]


_UNGUESSABLE = secrets.token_hex(16)
_functional: Any = _Key
_NTH: tuple[Any, ...] = tuple(
    _functional("_NthKey", [(f"nth_{nth}", f"{_UNGUESSABLE}.{nth}") for nth in range(MAX_KEYS)])
)
_decoder = msgspec.json.Decoder(dict[type(_NTH[0]), msgspec.Raw])  # type: ignore[misc]


def _without_long_strings(text: bytes) -> bytes:
    """The JSON `text` with its long strings replaced by a placeholder; `text` itself if it has none.

    Intake needs only the short values. A parser takes 250 µs for 400 KB of prompt, the search for the end of
    that string 4 µs. Examining a quotation mark takes about as long as parsing 500 bytes, so where marks are
    denser than that, the rest of the text is kept.
    """
    if len(text) <= _SMALL_BYTES:
        return text
    kept: list[bytes] = []
    copied, marks, in_string = 0, 0, True
    mark, end = -1, text.find(b'"')
    while end >= 0 and (marks <= _FEW_MARKS or end > marks * _BYTES_A_MARK):
        mark, end, marks = end, text.find(b'"', end + 1), marks + 1
        if not in_string:
            in_string = True  # JSON has no backslash outside a string, so `mark` begins a string
            continue
        part = text[mark + 1 : end] if text[end - 1] == _BACKSLASH else b""
        in_string = (len(part) - len(part.rstrip(b"\\"))) % 2 == 1  # the mark is escaped: the string goes on
        if end - mark > _LONGEST_NAME:
            kept += (text[copied : mark + 1], _PLACEHOLDER, b"\\" if in_string else b"")
            copied = end
    return b"".join((*kept, text[copied:])) if kept else text


def _simple_members(text: bytes) -> dict[str, Any] | None:
    """The decoded members of a small body without duplicate keys at any depth; None if in doubt.

    `Body` makes msgspec call `Enum._missing_` for every key. That takes 1 µs a key, most of the time of a
    small body, so small bodies are decoded whole (docs/decisions.md, 21). Decoding drops a duplicate member
    with the quotes of its key, so the body encoded again has fewer quotes. Only a `\\u` escape can spell a
    quote or a key in another way.
    """
    if len(text) > _SMALL_BYTES or (b"\\" in text and b"\\u" in text):
        return None
    try:
        members = orjson.loads(text)
        again = orjson.dumps(members)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return None
    if type(members) is not dict or len(members) > MAX_KEYS:
        return None
    return members if again.count(b'"') == text.count(b'"') else None


class Body:
    """The members of a JSON body, parsed on first access, with nested values left as JSON text.

    The decoder reports each key of the outermost object in order and returns each value as its raw bytes;
    nested values are validated and skipped, so parsing takes about the body's size in memory at any depth. A
    body with a used key twice is refused: a server that takes the other value could run another model. A body
    of `large_bytes` or more is parsed from an ASCII-only copy: one other character can make Python store a
    huge key with four bytes a character.
    """

    __slots__ = ("_keys", "_large_bytes", "_texts", "_values", "text")

    def __init__(self, text: bytes, large_bytes: int = 1024 * 1024) -> None:
        self.text, self._large_bytes = text, large_bytes
        self._values: Mapping[str, msgspec.Raw | memoryview] | None = None

    @property
    def values(self) -> Mapping[str, msgspec.Raw | memoryview]:
        """The JSON text of each key's value. Strings in it may be invalid UTF-8; the reader checks.

        Raises:
            BadRequest: the body is no JSON object, has too many keys, or has a used key twice.
        """
        if self._values is None:
            self._values = self._read(self.text)
        return self._values

    def _read(self, text: bytes) -> Mapping[str, msgspec.Raw | memoryview]:
        if not text:
            raise BadRequest("the body is empty; a JSON object with a model is needed")
        plain = len(text) < self._large_bytes or text.isascii()
        _keys.clear()
        try:
            texts = _decoder.decode(text if plain else text.translate(_ASCII_ONLY)).values()
        except msgspec.ValidationError:
            fault = f"has more than {MAX_KEYS} keys" if len(_keys) > MAX_KEYS else "must be a JSON object"
            raise BadRequest(f"the body {fault}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as malformed:
            raise BadRequest(f"the body is not valid JSON: {malformed}") from None
        except RecursionError:
            raise BadRequest("the body is not valid JSON: it is nested too deeply") from None
        self._keys = _keys.copy()
        self._texts: Collection[msgspec.Raw | memoryview] = texts
        if not plain:
            starts = self._starts(len(texts))
            whole = memoryview(text)
            texts = [whole[at : at + len(value)] for at, value in zip(starts, texts, strict=True)]
        values = dict(zip(self._keys, texts, strict=True))
        if len(values) < len(self._keys):
            for key in _USED & values.keys():
                if self._keys.count(key) > 1:
                    raise BadRequest(f"the body has {key} twice")
        return values

    def __len__(self) -> int:
        return len(self.text)

    def with_model(self, name: bytes) -> bytes:
        """The body with its model replaced by the JSON text `name` and all other bytes unchanged.

        Raises:
            BadRequest: the body has a key longer than MAX_KEY_CHARS.
        """
        if MODEL not in self.values:
            start = self.text.index(b"{") + 1
            more = b"," if self._keys else b""
            return b"".join((self.text[:start], b'"model":', name, more, memoryview(self.text)[start:]))
        size_bytes = len(self.values[MODEL])
        start = self._starts(self._keys.index(MODEL) + 1)[-1]
        text = memoryview(self.text)
        return b"".join((text[:start], name, text[start + size_bytes :]))

    def _starts(self, count: int) -> list[int]:
        """The byte offsets of the first `count` values."""
        if max(map(len, self._keys), default=0) > MAX_KEY_CHARS:
            raise BadRequest(f"the body has a key of more than {MAX_KEY_CHARS} characters")
        starts = []
        end = 0
        for value in islice(self._texts, count):
            key = _KEY.match(self.text, end)
            assert key is not None, "the decoder has read a key here"
            starts.append(key.end())
            end = key.end() + len(value)
        return starts
