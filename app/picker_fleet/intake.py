"""Turns headers and a body into an `InferenceRequest`. Pure: ids and random numbers are injected.

Called for each request. docs/protocol.md lists the headers; both spellings of a header count, the gateway's
first. A malformed body or header is a `BadRequest` that names it (G10). Only the workload
context is lenient (docs/specification.md): a malformed one makes an anonymous workload of criticality 3.
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

from picker_fleet import allowlist, cost
from picker_fleet.allowlist import FAIRNESS_ID, OBJECTIVE, REWRITE, Way
from picker_fleet.bands import Band, Bands, Criticality
from picker_fleet.bodies import OtherBody, as_utf8, is_form, read_form
from picker_fleet.config import Settings
from picker_fleet.errors import BadRequest
from picker_fleet.request import KEY_MARK, InferenceRequest, Workload, finite_number
from picker_fleet.scheduling.chooser import SESSION_HEADER as SESSION
from picker_fleet.scheduling.chooser import session_token_of
from picker_fleet.scheduling.endpoint_history import PROMPT_MEMBERS, block_hashes, prompt_bytes
from picker_fleet.sections import Model, Objective
from picker_fleet.traffic_split import Split, identity_of_body
from picker_fleet.units import duration_s, endpoint_address, has_control

METHOD, PATH = ":method", ":path"
REQUEST_ID = "x-request-id"
CONTENT_LENGTH = "content-length"
CONTENT_TYPE, CONTENT_ENCODING = "content-type", "content-encoding"
_OF_BODY = (CONTENT_LENGTH, CONTENT_TYPE, CONTENT_ENCODING)
FORWARDED_FOR = "x-forwarded-for"
TTL = ("x-llm-d-inference-ttl",)
# A client's own deadline. The last is the route timeout of another Envoy before this one, which an Envoy
# passes on only from internal peers.
REQUEST_TIMEOUT = "x-request-timeout"
GRPC_TIMEOUT = "grpc-timeout"
ROUTE_TIMEOUT = "x-envoy-expected-rq-timeout-ms"
DEADLINES = (REQUEST_TIMEOUT, GRPC_TIMEOUT, ROUTE_TIMEOUT)
WORKLOAD = ("x-workload-context",)
SESSION_HEADERS = frozenset(("session-id", "x-session-affinity"))
TRACE = "traceparent"
TEST_SELECTION = "test-epp-endpoint-selection"  # of the conformance suite
HEADERS = frozenset(
    (METHOD, PATH, FORWARDED_FOR, REQUEST_ID, *WORKLOAD, *TTL, *DEADLINES, SESSION, *_OF_BODY)
)
_PLAIN = frozenset((REQUEST_ID, *_OF_BODY))  # these set nothing
_NAMES = frozenset((*FAIRNESS_ID, *OBJECTIVE, *REWRITE))
_TIMES = frozenset((*TTL, *DEADLINES))

MAX_NAME_BYTES = 256  # of a model or a fairness id
MAX_WORKLOAD_ID_BYTES = 128
_SHORT_CONTEXT = 512  # characters; longer ones are not remembered
_MAX_MODEL_SETTINGS = 1000  # models and objectives that are remembered
DEFAULT_CRITICALITY = 3
_ANONYMOUS = Workload("", DEFAULT_CRITICALITY)
_MIN_TTL_S = 0.001

_FILE_BYTES_A_TEXT_BYTE = 250  # sound takes a token for 1000 bytes, text for 4

# The longest JSON text of a name: all in escapes.
_LONGEST_NAME = 6 * MAX_NAME_BYTES + 2
_QUOTE = ord('"')
_SALT_BYTES = 1024

MODEL = "model"
UNNAMED = "unnamed"  # the model of a request that needs none
_NO_NAMES = (b"null", b'""')
_JSON_TYPE = b"application/json"
# Types under which clients send JSON, whatever the server makes of it; curl's default is one of them.
_JSON_TYPES = re.compile(
    rb"$|application/(?:[a-z.]+\+)?json|text/|application/x-www-form-urlencoded", re.IGNORECASE
)
# One half of a surrogate pair without the other, which Python's and other readers take. Backslashes that
# escape each other must be gone.
_HALF_PAIR = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|[c-fC-F][0-9a-fA-F]{2}(?<!\\u[dD][89abAB]..\\u[dD][c-fC-F]..))",
    re.DOTALL,
)
_MOST_HALF_PAIRS = 64
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_OBJECT, _ARRAY = re.compile(rb"[ \t\r\n]*\{"), re.compile(rb"[ \t\r\n]*\[")
MAX_KEYS = 256  # of the outermost object; the OpenAI API knows about fifty
MAX_KEY_CHARS = 256

_BACKSLASH = ord("\\")
_FEW_MARKS = 32  # quotation marks that are looked at in any body
_BYTES_A_MARK = 512  # how far apart further ones must be on average
_PLACEHOLDER = b"x" * (_LONGEST_NAME + 1)  # no name is so long, so what is replaced is none, and stays none
_SMALL_BYTES = 4096  # a decoded body may take thirty times its size
_MOST_KEY_CHARS = 512  # of a key of a session, or an id of state
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

# Of a body, in hexadecimal. It need not withstand an attacker: he knows neither digest nor body.
_DIGEST_CHARS = 12
_TRUSTED_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class Ask(NamedTuple):
    """What a request's body asks for.

    `model` is '' if it names none; `needs_model` is False where it need not. `read` is the parsed body, or
    its bytes if it is a simple one. `body_bytes` is its length, `file_bytes` that of files in it; `members`
    say what it costs, those of a simple body decoded. `refers` are ids of state that it goes on with.
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
        """The body as it was read; empty if Envoy read it."""
        return self.read or b"" if self.read is None or isinstance(self.read, bytes) else self.read.text

    def renamed(self, target: str) -> bytes:
        """The body with `target` as its model, all else byte for byte as it was."""
        return self.body.with_model(orjson.dumps(target))


_JSON = Way("inference")


def read_body(text: bytes, way: Way = _JSON, content_type: bytes = b"") -> Ask:
    """What the decoded body of a request asks for, which is served by `way`.

    It is a JSON object that names its model, unless the way says that the model is elsewhere, or the
    content-type that it is something else.

    Raises:
        BadRequest: it is empty, not JSON, has a used key twice, or its model is unusable.
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
    """The ids of state that a request of the Responses API goes on with: a conversation may be an object."""
    found = (_text_at(members, path) for path in ("previous_response_id", "conversation", "conversation.id"))
    return tuple(filter(None, found))


def _text_at(members: cost.Members, path: str) -> str:
    """The short string at `path`, a member or one of a member; '' if there is none. Members are decoded, or
    JSON texts."""
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
    """What a request asks for that is admitted without a body."""
    return Ask(_model(way.model) if way.model else "", True, OtherBody(b""), needs_model=way.is_known)


def _read_otherwise(text: bytes, way: Way, content_type: bytes, fault: BadRequest) -> Ask:
    """What a body asks for that is no JSON object in UTF-8, for which `fault` is raised unless its model may
    be elsewhere. What may be an object is read as one: a server could take its model from it."""
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
    """JSON `text`, as long as before, with U+FFFD for its first halves of surrogate pairs."""
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
    """What a JSON object asks for.

    Raises:
        BadRequest: it is empty, no JSON object, has a used key twice, or its model is unusable.
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
        values = body.values  # its error says where in the whole body the fault is
    member = values.get(MODEL)
    model = (
        "" if member is None or bytes(memoryview(member)[:5]) in _NO_NAMES else _model_of(memoryview(member))
    )
    asks_stream = "stream" in values and bytes(memoryview(values["stream"])[:5]) == b"true"
    return Ask(model, asks_stream, body, len(text), values)


def read_subset(hint: object) -> tuple[str, ...]:
    """Endpoints (`ip:port`, canonical) of a subset hint: a list or a comma-separated string.

    What is no address names no endpoint and is left out; a hint that is neither form is empty.
    """
    entries = hint.split(",") if isinstance(hint, str) else hint if isinstance(hint, list | tuple) else ()
    found: list[str] = []
    for entry in entries:
        with suppress(ValueError):
            found.append(_canonical(str(entry).strip()))
    return tuple(found)


# A gateway's hints name the same endpoints again and again, hundreds in each request.
_canonical = lru_cache(maxsize=10_000)(endpoint_address)


def selected_endpoints(choice: bytes, addresses: Iterable[str]) -> tuple[str, ...]:
    """The endpoints that the conformance suite's header chooses: `ip:port`, or an `ip` of `addresses`."""
    parts = [part.strip() for part in choice.decode(errors="replace").split(",")]
    by_host: dict[str, list[str]] = {}
    for address in addresses:
        by_host.setdefault(address.rpartition(":")[0].strip("[]"), []).append(address)
    found = [address for part in parts for address in by_host.get(part.strip("[]"), ())]
    return tuple(dict.fromkeys((*found, *read_subset(parts))))


def wanted_headers(settings: Settings) -> frozenset[str]:
    """The headers (lower-case) that requests are read for under `settings`."""
    traces = {TRACE} if settings.tracing.enabled else frozenset()
    tests = {TEST_SELECTION} if settings.extproc.conformance else frozenset()
    keys = {key for key in settings.scheduling.session_keys if key in SESSION_HEADERS}
    return HEADERS | allowlist.trusted(settings.extproc.trusted_headers) | keys | traces | tests


class PrefixReader(Protocol):
    """The chooser, as far as intake goes."""

    @property
    def needs_prefix_hashes(self) -> bool: ...


class _ModelSettings(NamedTuple):
    """What the configuration says of a model and an objective; `target_model` is '' where the model has
    several variants."""

    target_model: str
    band: Band
    weight: float
    limit: int
    selector: Mapping[str, str]


class Intake:
    """Makes requests of headers and bodies under one configuration.

    `new_id` makes unique ids (UUIDs), `variant_key` has the key that chooses variants; `prefixes` says if a
    scorer reads the hashes of prompts, None for never; `served_models` names those that endpoints report.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        new_id: Callable[[], str],
        variant_key: Callable[[], bytes],
        prefixes: PrefixReader | None = None,
        served_models: Callable[[], Collection[str]] = tuple,
    ) -> None:
        queue = settings.fair_request_queue
        self.headers = wanted_headers(settings)
        self._bands = queue.bands
        self._unranked = (self._bands.named(Criticality.DEFAULT), 1.0)
        self.new_id, self._variant_key = new_id, variant_key
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
        """Take objectives and model rewrites that came while the replica runs, in place of the former ones.

        They count before configured ones of the same name, of which they keep the weight. `priorities` are by
        objective. `anything` is for models that `rewrites` lack.
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
        """The request that `ask` and `headers` (lower-case names, raw values) amount to.

        `trusted` says that Envoy itself set `x-request-id` (`lean`, `http`); else an id is made. One of a
        model's several variants follows from that id, or without it from the flow and the body.

        Raises:
            BadRequest: a header in use is malformed; the message names it.
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
        model = rewrite or ask.model or self._model_of_unnamed(ask)  # and with it what the request may use
        settings = self._model_settings.get((model, objective)) or self._settings_of(model, objective)
        target, band, weight, limit, selector = settings
        charge, learn = self._cost(ask, model)
        flow = fairness_id if fairness_id and self._by_fairness_id else model
        if not target:
            target = self._variant(model, raw_id if by_gateway else b"", flow, ask)
        prefixes = self._prefixes
        prefix = _prefix(target, ask) if prefixes and prefixes.needs_prefix_hashes else ()
        # By position: by name it takes three times as long.
        return InferenceRequest(
            request_id, model, target, ask.stream, flow, band, weight, workload, charge, ttl_s,
            subset, limit, learn, session, prefix, selector, trace, by_client, ask.body_bytes,
            xxh3_64_hexdigest(ask.text)[:_DIGEST_CHARS], ask.refers,
        )  # fmt: skip

    def session_of(self, headers: Mapping[str, bytes]) -> str:
        """The session of a request without a body that is read."""
        return session_token_of(headers) or self._session_key(headers, _NO_MEMBERS)

    def _session_key(self, headers: Mapping[str, bytes], members: cost.Members) -> str:
        """The first configured key that the request has, marked as one; '' without any."""
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
        """The model that servers take for a request that names none, '' if that is unknown.

        The configured one, or the only one of the pool. Where a live rewrite is for any model, the request
        has to name one.
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
        """The cost of `ask` in the stock's unit, and whether it lacks the answer's part."""
        is_one = isinstance(ask.read, bytes | None) and _is_one_sequence(ask.members)
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
        # Of its flow, on each endpoint: the lower one of its model's and its objective's.
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
        """The variants of `model`, by a live rewrite or else as configured; None for itself."""
        return self._rewrites.get(model, self._any_rewrite) or self._targets.get(model)

    def _variant(self, model: str, gateway_id: bytes, flow: str, ask: Ask) -> str:
        """Which of the several variants of `model` a request is sent as. `gateway_id` is empty if the gateway
        has set no id: a client could send ids until one leads to the variant it wants, and keep that id."""
        split, key = self._split_of(model), self._variant_key()
        assert split is not None, "a model without variants has its target in its settings"
        return split.variant(key, gateway_id or identity_of_body(key, flow, ask.text))

    def _ttl(self, text: str) -> float:
        """Seconds that a request may wait by its header; without one, the configured ones, and never more."""
        return min(max(_duration_s(TTL[0], text), _MIN_TTL_S), self._ttl_s) if text else self._ttl_s


def _deadline_s(headers: Mapping[str, bytes]) -> float:
    """Seconds until the first of a client's own deadlines; infinite without any.

    `x-request-timeout` is in seconds or a duration such as `500ms`, `grpc-timeout` as gRPC has it, the
    route's timeout in milliseconds, where 0 is none.

    Raises:
        BadRequest: one of them is malformed; the message names it.
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
    """The hashes of the prompt's blocks; none if it is not valid JSON, which its server refuses."""
    try:
        members = _prompt_decoder.decode(ask.read) if isinstance(ask.read, bytes) else ask.read.values
    except _MALFORMED:
        try:
            members = _prompt_decoder.decode(_without_half_pairs(ask.text))
        except _MALFORMED:
            return ()
    salt = memoryview(members.get("cache_salt", b""))[:_SALT_BYTES]
    return block_hashes(target_model, prompt_bytes(members), salt=bytes(salt))


class _PromptMembers(TypedDict, total=False):
    """The members of a simple body (`_simple_members`) that its prompt is made of, as JSON texts."""

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
    """Whether decoded `members` ask for one answer to one prompt; False if that is to be found out."""
    if not cost.SEVERAL.isdisjoint(members):
        return False
    for name in cost.PROMPTS:
        value = members.get(name)
        if type(value) is list and value and type(value[0]) is not dict:
            return False
    return True


def _workload(text: str) -> Workload:
    """The workload in the header's `text`; a text that says nothing makes an anonymous one."""
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


_short_context = lru_cache(maxsize=4096)(_workload)  # a workload's requests bring the same one


def _ranks(entries: Iterable[Model | Objective], bands: Bands) -> dict[str, tuple[Band, float]]:
    return {entry.name: (entry.band(bands), entry.weight) for entry in entries}


def _limits(entries: Iterable[Model | Objective]) -> dict[str, int]:
    return {entry.name: entry.max_inflight_per_endpoint or 0 for entry in entries}


def _model_of(text: memoryview) -> str:
    """The model whose JSON text is `text`, which may be of any size."""
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
    """The first header of `names` that says something, fit for a key; '' if none does."""
    text = _text(headers, names)
    fault = _name_fault(text) if text else None
    if fault:
        raise BadRequest(f"header {next(name for name in names if headers.get(name))} {fault}")
    return text


def _name_fault(text: str) -> str | None:
    """Why `text` can't be a name in the shared state; None if it can."""
    if _too_long(text, MAX_NAME_BYTES):
        return f"is longer than {MAX_NAME_BYTES} bytes"
    return _fault_of_short(text)


@lru_cache(maxsize=4096)
def _fault_of_short(text: str) -> str | None:
    """The same names come again and again."""
    if not text.strip():
        return "is empty"
    return "contains a control character" if has_control(text) else None


def _too_long(text: str, limit_bytes: int) -> bool:
    return len(text) > limit_bytes or (not text.isascii() and len(text.encode()) > limit_bytes)


def _text(headers: Mapping[str, bytes], names: tuple[str, ...]) -> str:
    """The value of the first header of `names` that has one; '' if none has."""
    for name in names:
        raw = headers.get(name)
        if raw:
            try:
                return raw.decode()
            except UnicodeDecodeError:
                raise BadRequest(f"header {name} is not valid UTF-8") from None
    return ""


_keys: list[str] = []  # of the body that is being read: decoding is one step of the event loop


class _Key(enum.Enum):
    """Its members stand for the first, the second, … key of a body, whatever their names."""

    __hash__ = object.__hash__  # an Enum's own takes as long as all the rest

    @classmethod
    def _missing_(cls, key: str) -> Any:  # type: ignore[override]
        """The member for the next key of the body; one past the last ends the decoding."""
        _keys.append(key)
        return _NTH[len(_keys) - 1]


_UNGUESSABLE = secrets.token_hex(16)
_functional: Any = _Key
_NTH: tuple[Any, ...] = tuple(
    _functional("_NthKey", [(f"nth_{nth}", f"{_UNGUESSABLE}.{nth}") for nth in range(MAX_KEYS)])
)
_decoder = msgspec.json.Decoder(dict[type(_NTH[0]), msgspec.Raw])  # type: ignore[misc]


def _without_long_strings(text: bytes) -> bytes:
    """A body of the same members, with something shorter in place of what is long between two quotation
    marks of a string; `text` itself if nothing is.

    What a request asks for is in its short values. A parser takes 250 µs for 400 KB of prompt, the search for
    its end 4. Each mark takes about as long as 500 bytes of parsing, so where they come more often, the rest
    stays as it is.
    """
    if len(text) <= _SMALL_BYTES:
        return text
    kept: list[bytes] = []
    copied, marks, in_string = 0, 0, True
    mark, end = -1, text.find(b'"')
    while end >= 0 and (marks <= _FEW_MARKS or end > marks * _BYTES_A_MARK):
        mark, end, marks = end, text.find(b'"', end + 1), marks + 1
        if not in_string:
            in_string = True  # JSON has no backslash outside a string, so `mark` begins one
            continue
        part = text[mark + 1 : end] if text[end - 1] == _BACKSLASH else b""
        in_string = (len(part) - len(part.rstrip(b"\\"))) % 2 == 1  # the mark is escaped: the string goes on
        if end - mark > _LONGEST_NAME:
            kept += (text[copied : mark + 1], _PLACEHOLDER, b"\\" if in_string else b"")
            copied = end
    return b"".join((*kept, text[copied:])) if kept else text


def _simple_members(text: bytes) -> dict[str, Any] | None:
    """The members of a small body that has no key twice at any depth; None if in doubt.

    msgspec calls `Enum._missing_` for each key that it cannot look up, which for `Body` is every key. That
    takes 1 µs a key, most of what a small body costs, so small bodies are decoded whole (docs/decisions.md,
    21). Encoded again, such a body has as many quotes as before: a duplicated member is dropped with the
    quotes of its key. Only a `\\u` escape can spell a quote or a key otherwise.
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
    """A body's members, read when they are first asked for, without building what is in them.

    The decoder reports each key of the outermost object in order and returns each value as its raw bytes;
    nested values are validated and skipped. So a body costs about its own size, however deep it nests. A body
    that has a used key twice is refused: a server that takes the other one would run another model. One of
    `large_bytes` or more is read through a copy that is ASCII only: a key of its size with one other letter
    would take four bytes a letter.
    """

    __slots__ = ("_keys", "_large_bytes", "_texts", "_values", "text")

    def __init__(self, text: bytes, large_bytes: int = 1024 * 1024) -> None:
        self.text, self._large_bytes = text, large_bytes
        self._values: Mapping[str, msgspec.Raw | memoryview] | None = None

    @property
    def values(self) -> Mapping[str, msgspec.Raw | memoryview]:
        """The JSON text of each key's value. Strings in it may be invalid UTF-8; the reader checks.

        Raises:
            BadRequest: it is no JSON object, or one that is not to be read.
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
        """The body with the JSON text `name` as its model, all else byte for byte as it was.

        Raises:
            BadRequest: it has a key that is too long to be passed over.
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
        """Where each of the first `count` values begins."""
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
