"""Turns a request's headers and body into an `InferenceRequest`. The module is pure: ids are injected.

The picker calls this module for each request. The module `headers` parses headers, `json_body` reads JSON
bodies that are too large or unusual to be decoded whole here, and `bodies` reads bodies that are not plain
JSON. A malformed body or header raises a `BadRequest` that names the fault (G10).
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import orjson
from xxhash import xxh3_64_hexdigest

from picker_fleet.domain.allowlist import FAIRNESS_ID, OBJECTIVE, REWRITE, Way
from picker_fleet.domain.bands import Band, Bands, Criticality
from picker_fleet.domain.config import Settings
from picker_fleet.domain.errors import BadRequest
from picker_fleet.domain.request import (
    ANY_LATENCY,
    KEY_MARK,
    UNLEARNED,
    InferenceRequest,
    LatencyObjective,
    PromptLine,
)
from picker_fleet.domain.sections import Model, Objective
from picker_fleet.domain.units import MAX_NAME_BYTES, has_control
from picker_fleet.ingress import cost, media
from picker_fleet.ingress.bodies import OtherBody, as_utf8, is_form, read_form
from picker_fleet.ingress.headers import (
    ANONYMOUS,
    OF_BODY,
    REQUEST_ID,
    SESSION_HEADERS,
    SLO,
    TIMES,
    TRACE,
    latency_of,
    text_of,
    ttl_of,
    wanted_headers,
    workload_of,
)
from picker_fleet.ingress.json_body import (
    LONGEST_NAME,
    MAX_KEYS,
    MODEL,
    SMALL_BYTES,
    Body,
    check_json,
    prompt_prefix,
    without_half_pairs,
    without_long_strings,
)
from picker_fleet.ingress.traffic_split import Split, identity_of_body
from picker_fleet.scheduling.chooser import EndpointChooser
from picker_fleet.scheduling.extension_calls import CostFacts
from picker_fleet.scheduling.sessions import session_token_of
from picker_fleet.state.accounting_token import Keyring

_PLAIN = frozenset((REQUEST_ID, *OF_BODY))  # a request with only these headers needs no parsing of headers
_NAMES = frozenset((*FAIRNESS_ID, *OBJECTIVE, *REWRITE))
_SLO = frozenset(SLO)
_MAX_MODEL_SETTINGS = 1000  # maximum pairs of model and objective whose settings are cached

UNNAMED = "unnamed"  # stands for the model of a request that names no model and needs none
_NO_NAMES = (b"null", b'""')
_JSON_TYPE = b"application/json"
# Content types under which clients send JSON, such as curl's default; some servers then read it as JSON.
_JSON_TYPES = re.compile(
    rb"$|application/(?:[a-z.]+\+)?json|text/|application/x-www-form-urlencoded", re.IGNORECASE
)
_OBJECT, _ARRAY = re.compile(rb"[ \t\r\n]*\{"), re.compile(rb"[ \t\r\n]*\[")
_MOST_KEY_CHARS = 512  # maximum characters of a session key, or of the id of a response or conversation

_ANYWHERE: Mapping[str, str] = {}
_NO_MEMBERS: cost.Members = {}

# Hexadecimal digits of a body's digest. Attackers know neither digest nor body, so a short digest suffices.
_DIGEST_CHARS = 12
_TRUSTED_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class Ask(NamedTuple):
    """What a request's body asks for: its model, stream flag, size and ids of stored state.

    `model` is '' if the body names no model; `needs_model` is False on a path of no known API. `read` is the
    parsed body, or the bytes of a simple body (`_simple_members`), whose `members` are already decoded.
    `body_bytes` counts the bytes of the whole body; `files` has the byte ranges of a form's files. `refers`
    has the ids of stored state that the request continues. `can_split` and `generates` come from the `Way`.
    """

    model: str
    stream: bool
    read: "Body | OtherBody | bytes"
    body_bytes: int = 0
    members: cost.Members = _NO_MEMBERS
    files: tuple[tuple[int, int], ...] = ()
    needs_model: bool = True
    refers: tuple[str, ...] = ()
    can_split: bool = False
    generates: bool = True

    @property
    def body(self) -> "Body | OtherBody":
        return Body(self.read) if isinstance(self.read, bytes) else self.read

    @property
    def text(self) -> bytes:
        """The bytes of the request's body; empty if the request was admitted without a body."""
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
        BadRequest: the body is empty, not JSON, or repeats a key that counts; or its model is unusable.
    """
    if content_type and content_type != _JSON_TYPE:
        is_multipart = content_type[:9].lower() == b"multipart"
        if is_multipart or (way.source == "form" and is_form(content_type)):
            form = read_form(text, content_type)
            model = _model(form.model) if form.model else way.model
            is_stream = form.stream.lower() in ("true", "1")
            return Ask(model, is_stream, form.body, len(text), files=form.files)
    try:
        ask = _read_object(text, way.can_split)
    except BadRequest as fault:
        ask = _read_otherwise(text, way, content_type, fault)
    if way.has_state:
        ask = ask._replace(refers=_refers(ask.members))
    if way.model and (way.source == "path" or not ask.model):
        ask = ask._replace(model=_model(way.model))
    if way.is_known and way.generates:
        return ask
    return ask._replace(needs_model=way.is_known, generates=way.generates)


def _refers(members: cost.Members) -> tuple[str, ...]:
    """The ids of the response and conversation that a request continues (`conversation` may be an object)."""
    found = (_text_at(members, path) for path in ("previous_response_id", "conversation", "conversation.id"))
    return tuple(filter(None, found))


def _text_at(members: cost.Members, path: str) -> str:
    """The string at `path` (`member` or `member.inner`); '' if it is missing or over `_MOST_KEY_CHARS` long.
    Each of `members` is either decoded or a JSON text."""
    name, _, inner = path.partition(".")
    value: Any = members.get(name, "")
    if not isinstance(value, str | dict):
        try:
            value = orjson.loads(memoryview(value)) if len(value) <= SMALL_BYTES else ""
        except (TypeError, orjson.JSONDecodeError):
            return ""
    if inner:
        value = value.get(inner) if isinstance(value, dict) else ""
    return value if isinstance(value, str) and len(value) <= _MOST_KEY_CHARS else ""


def bodiless(way: Way) -> Ask:
    """The `Ask` of a request that is admitted without a body."""
    return Ask(_model(way.model) if way.model else "", True, OtherBody(b""), needs_model=way.is_known)


def _read_otherwise(text: bytes, way: Way, content_type: bytes, fault: BadRequest) -> Ask:
    """Parse a body that is not a JSON object in UTF-8; raise `fault` unless the model may be named elsewhere.
    A body that a model server could read as a JSON object with a model is read in the same way here."""
    plain = as_utf8(text)
    whole = without_half_pairs(plain)
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
        check_json(text)
    return Ask("", False, OtherBody(text), len(text))


def _read_object(text: bytes, can_split: bool = False) -> Ask:
    """Parse a body that is a JSON object; `can_split` is copied from the `Way`.

    Raises:
        BadRequest: the body is empty, no JSON object, or repeats a key that counts; or the model is unusable.
    """
    short = text if len(text) <= SMALL_BYTES else without_long_strings(text)
    members = _simple_members(short)
    if members is not None:
        asks_stream = members.get("stream") is True
        name = members.get(MODEL)
        model = "" if name is None or name == "" else _model(name)
        return Ask(model, asks_stream, text, len(text), members, (), True, (), can_split)
    body = Body(text)
    try:
        values = (body if short is text else Body(short)).values
    except BadRequest:
        values = body.values  # raises an error with the fault's position in the whole body
    member = values.get(MODEL)
    model = (
        "" if member is None or bytes(memoryview(member)[:5]) in _NO_NAMES else _model_of(memoryview(member))
    )
    asks_stream = "stream" in values and bytes(memoryview(values["stream"])[:5]) == b"true"
    return Ask(model, asks_stream, body, len(text), values, (), True, (), can_split)


def _simple_members(text: bytes) -> dict[str, Any] | None:
    """The decoded members of a small JSON body; None if the body may have duplicate keys at some depth.

    `Body` makes msgspec call `Enum._missing_` for every key. The call of `_missing_` takes 1 µs a key, most
    of the time for a small body, so small bodies are decoded whole (docs/decisions.md, 21). Decoding drops
    duplicate members: if the decoded body, encoded again, has fewer quotes, the body had duplicate keys. Only
    a `\\u` escape could spell a quote or a key in another way.
    """
    if len(text) > SMALL_BYTES or (b"\\" in text and b"\\u" in text):
        return None
    try:
        members = orjson.loads(text)
        again = orjson.dumps(members)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return None
    if type(members) is not dict or len(members) > MAX_KEYS:
        return None
    return members if again.count(b'"') == text.count(b'"') else None


class _ModelSettings(NamedTuple):
    """The settings of one model and objective; `target_model` is '' if the model has several variants."""

    target_model: str
    band: Band
    weight: float
    limit: int
    selector: Mapping[str, str]
    latency: LatencyObjective


class Intake:
    """Makes requests from headers and bodies under one configuration.

    `new_id` makes unique ids (UUIDs); `keys` has the key that chooses variants; `prefixes` says whether a
    scorer reads prompt hashes (None: never); `served_models` lists models that endpoints report;
    `prompt_line` returns a model's line, which gives a prompt's tokens by the prompt's size; `estimate_cost`
    is the cost estimator of an extension.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        new_id: Callable[[], str],
        keys: Keyring,
        prefixes: EndpointChooser | None = None,
        served_models: Callable[[], Collection[str]] = tuple,
        prompt_line: Callable[[str], PromptLine] = lambda model: UNLEARNED,
        estimate_cost: Callable[[CostFacts], float | None] | None = None,
    ) -> None:
        queue = settings.fair_request_queue
        self.headers = wanted_headers(settings)
        self._bands = queue.bands
        self._unranked = (self._bands.named(Criticality.DEFAULT), 1.0)
        self.new_id, self._keys = new_id, keys
        self._ttl_s = queue.queue_ttl
        self._by_fairness_id = queue.flow_key == "fairness-id"
        self._in_tokens = settings.request_queue_controller.unit == "tokens"
        self._estimate_cost = estimate_cost
        self._answer_tokens, self._prompt_line = queue.default_answer_tokens, prompt_line
        self._models = _ranks(settings.models, self._bands)
        self._limits = _limits(settings.models)
        self._longest = {each.name: each.max_model_len for each in settings.models if each.max_model_len}
        self._objective_limits = _limits(settings.objectives)
        self._latencies = {each.name: each.latency for each in settings.models}
        self._objective_latencies = {each.name: each.latency for each in settings.objectives}
        self._selectors = {
            model.name: dict(model.endpoint_labels) for model in settings.models if model.endpoint_labels
        }
        self._prefixes = prefixes
        self._session_keys = settings.scheduling.session_keys
        tenants = settings.tenants
        self._counts_quotas = tenants is not None
        self._tenant_headers = () if tenants is None else tenants.headers or ()
        self._plain = _PLAIN.union(self._tenant_headers)
        separator = "" if tenants is None else tenants.separator
        # Cached, since requests repeat the same values of tenants' headers.
        self._path_of = lru_cache(maxsize=4096)(partial(_path_of, self._tenant_headers, separator))
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
        self._model_settings: dict[tuple[str, str], _ModelSettings] = {}  # (model, objective) -> settings

    def use_live(
        self, priorities: Mapping[str, int], rewrites: Mapping[str, Split], anything: Split | None
    ) -> None:
        """Replace the live objectives and model rewrites (from the Kubernetes API).

        A live entry overrides a configured entry of the same name; an objective keeps its configured weight.
        `priorities` maps an objective to its priority. `anything` is the rewrite of models not in `rewrites`.
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

        `trusted` says that Envoy itself set `x-request-id`; otherwise the picker makes an id. If a model has
        several variants, Envoy's id chooses the variant, or, without that id, the flow and the body do.

        Raises:
            BadRequest: a header that the picker reads is malformed; the message names it.
        """
        raw_id = headers.get(REQUEST_ID, b"") if trusted else b""
        by_gateway = _TRUSTED_ID.fullmatch(raw_id) is not None
        request_id = raw_id.decode() if by_gateway else self.new_id()
        fairness_id = objective = rewrite = session = trace = ""
        workload = ANONYMOUS
        ttl_s, by_client = self._ttl_s, False
        if not headers.keys() <= self._plain:
            if not _NAMES.isdisjoint(headers):
                fairness_id = _name(headers, FAIRNESS_ID)
                objective = _name(headers, OBJECTIVE)
                rewrite = _name(headers, REWRITE)
            if not TIMES.isdisjoint(headers):
                ttl_s, by_client = ttl_of(headers, self._ttl_s)
            workload = workload_of(headers)
            session = session_token_of(headers)
            trace = headers.get(TRACE, b"").decode("latin-1")
        if self._session_keys and not session:
            session = self._session_key(headers, ask.members)
        model = rewrite or ask.model or self._model_of_unnamed(ask)
        settings = self._model_settings.get((model, objective)) or self._settings_of(model, objective)
        target, band, weight, limit, selector, latency = settings
        if not _SLO.isdisjoint(headers):
            latency = latency_of(headers, latency)
        text = ask.text
        charge, learn, prompt_size, prompt_tokens, answer_tokens, found = self._cost(ask, text, model)
        flow = fairness_id if fairness_id and self._by_fairness_id else model
        if self._tenant_headers:
            flow = self._path_of(*map(headers.get, self._tenant_headers)) or flow
        if not target:
            target = self._variant(model, raw_id if by_gateway else b"", flow, ask)
        prefixes = self._prefixes
        prefix = prompt_prefix(target, ask.read) if prefixes and prefixes.needs_prefix_hashes else ()
        # Pass positional arguments: keyword arguments would take three times as long.
        return InferenceRequest(
            request_id, model, target, ask.stream, flow, band, weight, workload, charge, ttl_s,
            subset, limit, learn, session, prefix, selector, trace, by_client, ask.body_bytes,
            xxh3_64_hexdigest(text)[:_DIGEST_CHARS], ask.refers,
            0 if ask.refers else prompt_size,  # with stored state, usage counts the earlier prompts, too
            "", latency, 0, prompt_tokens, answer_tokens, ask.can_split, found.number,
            0 if found is media.NONE else found.prompt_bytes(ask.body_bytes),
        )  # fmt: skip

    def session_of(self, headers: Mapping[str, bytes]) -> str:
        """The session of a request whose body the picker does not read, by its headers alone."""
        return session_token_of(headers) or self._session_key(headers, _NO_MEMBERS)

    def _session_key(self, headers: Mapping[str, bytes], members: cost.Members) -> str:
        """KEY_MARK and the first of the configured session keys that the request has; '' without any."""
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
        """The model of a request that names no model: the configured default model, or else the pool's only
        model; '' if neither is known. While a live rewrite applies to any model, only the configured default
        model counts.
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
            raise BadRequest("the request names no model, and the pool has no default model (default_model)")
        return model

    def _cost(self, ask: Ask, text: bytes, model: str) -> tuple[float, bool, int, float, float, media.Found]:
        """The cost of `ask`, with the body `text`, in the stock's unit; whether this cost lacks the answer's
        tokens; the prompt's size, 0 if usage will not show its tokens; the tokens of prompt and of answer, 0
        without tenants; the media in the body."""
        members = ask.members
        is_one = _is_one_text(members)
        count = 1 if is_one else cost.sequences(members)
        counts = self._in_tokens or self._counts_quotas or self._estimate_cost is not None
        prefixes, found = self._prefixes, media.NONE
        encoded = ask.can_split and prefixes is not None and prefixes.has_encoders
        if counts or encoded or (ask.body_bytes > media.SHORT_BYTES and self._predicts_media(ask, text)):
            found = media.of_form(text, ask.files) if ask.files else media.found(text, members)
            if found.number and not encoded:
                found = found._replace(number=0)
        if not counts:
            return float(count), False, 0, 0.0, 0.0, found
        prompt, answer, lacks_answer, size = cost.tokens(
            text,
            ask.body_bytes,
            members,
            count=count,
            most=self._longest.get(model, math.inf),
            default=self._answer_tokens,
            line=self._prompt_line(model),
            found=found,
            is_one=is_one,
        )
        if not ask.generates:
            answer, lacks_answer = 0.0, False
        estimated = None
        if self._estimate_cost is not None:
            facts = CostFacts(model, ask.body_bytes, count, prompt, answer, members)
            estimated = self._estimate_cost(facts)
        if estimated is not None or not self._in_tokens:
            # The scripts add the mean answer only to the picker's own estimate in tokens: for any other cost,
            # use the configured length of an answer here.
            answer, lacks_answer = float(self._answer_tokens) if lacks_answer else answer, False
        if estimated is None:
            estimated = prompt + answer if self._in_tokens else float(count)
        if not self._counts_quotas:
            prompt = answer = 0.0
        return estimated, lacks_answer, size if self._in_tokens else 0, prompt, answer, found

    def _predicts_media(self, ask: Ask, text: bytes) -> bool:
        """Whether latencies are predicted, and media may take most of the body."""
        predicts = self._prefixes is not None and self._prefixes.predicts
        return predicts and (bool(ask.files) or media.may_fill(text))

    def _settings_of(self, model: str, objective: str) -> _ModelSettings:
        ranks, name = (self._objectives, objective) if objective else (self._models, model)
        band, weight = ranks.get(name, self._unranked)
        # The lower of the model's and the objective's limit of a flow's requests in flight on an endpoint.
        limits = (self._limits.get(model, 0), self._objective_limits.get(objective, 0) if objective else 0)
        of_model = self._latencies.get(model, ANY_LATENCY)
        of_objective = self._objective_latencies.get(objective, ANY_LATENCY) if objective else ANY_LATENCY
        split = self._split_of(model)
        names = (model,) if split is None else split.names
        settings = _ModelSettings(
            target_model=names[0] if len(names) == 1 else "",
            band=band,
            weight=weight,
            limit=min(filter(None, limits), default=0),
            selector=self._selectors.get(model, _ANYWHERE),
            latency=LatencyObjective(*map(min, of_model, of_objective)),
        )
        if len(self._model_settings) >= _MAX_MODEL_SETTINGS:
            self._model_settings.clear()
        self._model_settings[model, objective] = settings
        return settings

    def _split_of(self, model: str) -> Split | None:
        """The variants of `model`, by a live rewrite or else by the configuration; None without variants."""
        return self._rewrites.get(model, self._any_rewrite) or self._targets.get(model)

    def _variant(self, model: str, gateway_id: bytes, flow: str, ask: Ask) -> str:
        """Choose one of the several variants of `model`. `gateway_id` is the request's id if the gateway has
        set it, else empty: a client that chooses the id could choose its variant."""
        split, key = self._split_of(model), self._keys.variant_key
        assert split is not None, "the settings of a model without variants name its target"
        return split.variant(key, gateway_id or identity_of_body(key, flow, ask.text))


def _path_of(names: tuple[str, ...], separator: str, *values: bytes | None) -> str:
    """The tenant's path: the `values` of the headers `names`, up to the first missing value; '' without any.

    Raises:
        BadRequest: a value is no name, or contains the separator and so could name another tenant.
    """
    path = ""
    for name, value in zip(names, values, strict=True):
        segment = text_of({name: value or b""}, name).strip()
        if not segment:
            break
        if separator in segment:
            raise BadRequest(f"header {name} contains {separator!r}, which separates tenants")
        path = f"{path}{separator}{segment}" if path else segment
    fault = _name_fault(path) if path else None
    if fault:
        raise BadRequest(f"the tenant in {', '.join(names)} {fault}")
    return path


def _is_one_text(members: cost.Members) -> bool:
    """Whether `members` certainly ask for one answer to one prompt, which is text or chat messages."""
    if not cost.SEVERAL.isdisjoint(members):
        return False
    for name in cost.PROMPTS:
        value = members.get(name)
        if value is None or type(value) is str:
            continue
        if type(value) is not list or not value or type(value[0]) is not dict:
            return False
    return True


def _ranks(entries: Iterable[Model | Objective], bands: Bands) -> dict[str, tuple[Band, float]]:
    return {entry.name: (entry.band(bands), entry.weight) for entry in entries}


def _limits(entries: Iterable[Model | Objective]) -> dict[str, int]:
    return {entry.name: entry.max_inflight_per_endpoint or 0 for entry in entries}


def _model_of(text: memoryview) -> str:
    """The model name in the JSON text `text`, which may be of any type and size."""
    if text[0] != ord('"'):
        raise BadRequest("the model must be a string")
    if len(text) > LONGEST_NAME:
        raise BadRequest(f"the model is longer than {MAX_NAME_BYTES} bytes")
    try:
        return _model(orjson.loads(text))
    except orjson.JSONDecodeError as fault:
        raise BadRequest(f"the body is not valid JSON: its model: {fault}") from None


def _model(value: object) -> str:
    if not isinstance(value, str):
        raise BadRequest("the model must be a string")
    if fault := _name_fault(value):
        raise BadRequest(f"the model {fault}")
    return value


def _name(headers: Mapping[str, bytes], names: tuple[str, ...]) -> str:
    """The value of the first non-empty header of `names`, checked as a name; '' if all headers are empty."""
    text = text_of(headers, *names)
    fault = _name_fault(text) if text else None
    if fault:
        raise BadRequest(f"header {next(name for name in names if headers.get(name))} {fault}")
    return text


def _name_fault(text: str) -> str | None:
    """The reason why `text` cannot be a name in the shared state; None if `text` is a valid name."""
    if len(text) > MAX_NAME_BYTES or (not text.isascii() and len(text.encode()) > MAX_NAME_BYTES):
        return f"is longer than {MAX_NAME_BYTES} bytes"
    return _fault_of_short(text)


@lru_cache(maxsize=4096)
def _fault_of_short(text: str) -> str | None:
    """The reason why a name of valid length is invalid; cached, since requests repeat the same names."""
    if not text.strip():
        return "is empty"
    return "contains a control character" if has_control(text) else None
