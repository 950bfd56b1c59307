"""The accounting token, with which any replica can account for a placed request, and the signing keys.

Envoy carries the token in dynamic metadata and returns it with each access-log entry. Tabs join the token's
fields, in the order of state/schema.py; no field can contain a tab, since the picker refuses control
characters in requests. Optional fields follow: the time, if the request was placed without Redis; the
priority, if the band is not a named one; the load of the endpoint, if latencies are predicted; the prefill
endpoint of a split request, with its load; the size of the prompt, if the engine's usage will show the
prompt's own tokens. The last field is the fleet's signature over the request's id and all fields before it; a
traceparent may follow.

The fleet's signing keys are kept in Redis; they also sign session tokens and requests between replicas. Each
heartbeat offers the keys that this replica holds and gets the keys in force (lua/heartbeat.lua), so the keys
survive the loss of the shared state. A new key is distributed a whole period before it signs, so that every
replica knows the key before it has to check a signature. A signature has 28 printable characters: the name of
its key, and 96 bits of a keyed BLAKE2b hash.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from typing import Final

from picker_fleet.domain.bands import Criticality
from picker_fleet.domain.request import InferenceRequest
from picker_fleet.state.schema import (
    ACCOUNTING_TOKEN,
    ADMITTED_ALONE,
    OTHER_PRIORITY,
    PLACED_LOAD,
    PREFILL,
    PROMPT_SIZE,
)

# Codes of the reasons why a replica rejects an accounting token.
NO_TOKEN: Final = "no-token"
UNSIGNED: Final = "unsigned"
UNKNOWN_KEY: Final = "unknown-key"
BAD_SIGNATURE: Final = "bad-signature"

_KEY_BYTES = 16
_NAME = 4  # length of a key's name, with which each signature begins
LENGTH: Final = _NAME + 24  # length of a signature

_PURPOSE = "accounting-token"
_TRACEPARENT = "00-"

_NUMBERS = {criticality: str(number) for number, criticality in enumerate(Criticality)}
_FLOW, _COST, _MODEL, _ENDPOINT = map(ACCOUNTING_TOKEN.index, ("flow", "cost", "model", "endpoint"))
_FIELDS = len(ACCOUNTING_TOKEN)  # number of fields before optional fields, signature and traceparent


class Keyring:
    """The fleet's signing keys that this replica knows; until the first heartbeat, a random key of its own.

    The key `variant_key` chooses model variants (traffic_split.py); it stays the same when signing keys
    change. The number `version` grows with each change of the signing keys.
    """

    def __init__(self) -> None:
        self.version = 0
        self._fresh = secrets.token_hex(_KEY_BYTES)  # a candidate for the fleet's next key
        self._keys: tuple[str, ...] = ()  # newest first
        self._use((self._fresh,))
        self.first = ""  # the pool's first key and its time, as in the heartbeat's reply; '' until then
        self.variant_key = bytes.fromhex(self._fresh)

    def offer(self) -> str:
        """The heartbeat's argument: an unused key, then the known keys, newest first, separated by blanks."""
        return " ".join((self._fresh, *self._keys))

    def take(self, keys: str, first: str = "") -> None:
        """Use the reply to a heartbeat: the keys in force, newest first, and the `first` key."""
        if first and first != self.first:
            self.first = first
            self.variant_key = hashlib.blake2b(first.encode(), digest_size=_KEY_BYTES).digest()
        keys_in_force = tuple(keys.split())
        if not keys_in_force or keys_in_force == self._keys:
            return
        self._keys = keys_in_force
        if self._fresh in keys_in_force:
            self._fresh = secrets.token_hex(_KEY_BYTES)
        self._use(keys_in_force)

    def _use(self, keys: tuple[str, ...]) -> None:
        self._macs = {}
        for key in keys:
            mac = hashlib.blake2b(key=bytes.fromhex(key), digest_size=(LENGTH - _NAME) // 2)
            self._macs[hashlib.blake2b(bytes.fromhex(key)).hexdigest()[:_NAME]] = mac
        # Sign with the second newest key: the newest may not have reached every replica.
        self._name = list(self._macs)[min(1, len(self._macs) - 1)]
        self.version += 1

    def sign(self, purpose: str, text: str) -> str:
        """The signature of `text`, valid for `purpose` alone."""
        return self._signature(self._name, purpose, text)

    def signatures(self, purpose: str, text: str) -> list[str]:
        """All signatures of `text` that are valid now, one per known key."""
        return [self._signature(name, purpose, text) for name in self._macs]

    def fault(self, purpose: str, text: str, signature: str) -> str:
        """The code of the reason why `signature` is not valid for `text`; '' if it is valid."""
        if len(signature) != LENGTH:
            return BAD_SIGNATURE if signature else UNSIGNED
        name = signature[:_NAME]
        if name not in self._macs:
            return UNKNOWN_KEY
        right = self._signature(name, purpose, text)
        return "" if hmac.compare_digest(right.encode(), signature.encode()) else BAD_SIGNATURE

    def _signature(self, name: str, purpose: str, text: str) -> str:
        mac = self._macs[name].copy()
        mac.update(f"{purpose}\n{text}".encode())
        return name + mac.hexdigest()


def write(
    request: InferenceRequest,
    endpoint: str,
    answer_tokens: float = 0,
    alone_ms: int | None = None,
    load: Iterable[float] = (),
    prefiller: str = "",
    prefill_load: Iterable[float] = (),
) -> str:
    """The accounting token of `request` placed on `endpoint` (`ip:port`).

    `alone_ms` is the time by Redis's clock, if the request was placed without Redis. `answer_tokens` is
    added to a cost that lacks the answer: when Redis needs the token, it has also lost the flow's mean answer
    length. `load` is the endpoint's load at the placement, for the latency model; empty if the model needs
    none. `prefiller` is the endpoint that computes the prompt of a split request, and `prefill_load` its load
    at that time.
    """
    workload, band = request.workload, request.band
    cost = request.cost + answer_tokens if request.learn else request.cost
    fields = (
        f"{request.flow}\t{_NUMBERS[band.criticality]}\t{request.weight!r}\t{cost!r}\t"
        f"{workload.id}\t{workload.criticality}\t"
        f"{request.model}\t{endpoint}\t{request.limit}"
    )
    if alone_ms is not None:
        fields += f"\t{ADMITTED_ALONE}{alone_ms}"
    if not band.is_named:
        fields += f"\t{OTHER_PRIORITY}{band.priority}"
    if load:
        fields += f"\t{PLACED_LOAD}{','.join(f'{number:.6g}' for number in load)}"
    if prefiller:
        fields += f"\t{PREFILL}{','.join((prefiller, *(f'{number:.6g}' for number in prefill_load)))}"
    if request.prompt_size:
        fields += f"\t{PROMPT_SIZE}{request.prompt_size}"
    return fields


def signed(token_fields: str, request_id: str, keys: Keyring) -> str:
    """The accounting token of request `request_id`: the `fields` returned by `write`, and their signature."""
    signature = keys.sign(_PURPOSE, f"{request_id}\t{token_fields}")
    return f"{token_fields}\t{signature}"


def of_read(request_id: str, keys: Keyring) -> str:
    """The token of a read, that is, a request that needs no admission: all fields are empty."""
    return signed("\t" * (_FIELDS - 1), request_id, keys)


def is_read(token: str) -> bool:
    """Whether `token` was made by `of_read`; any other token begins with a flow."""
    return token[:1] == "\t"


def fault_of(token: str, request_id: str, keys: Keyring) -> str:
    """The code of the reason why `token` is not the fleet's token for `request_id`; '' if it is."""
    own, _ = split_trace(token)
    token_fields, _, signature = own.rpartition("\t")
    if own.count("\t") < _FIELDS:
        signature = ""
    return keys.fault(_PURPOSE, f"{request_id}\t{token_fields}", signature)


def is_alone(token: str) -> bool:
    """Whether the request of `token` was placed without Redis."""
    if ADMITTED_ALONE not in token:  # most tokens lack this field: do not split the token
        return False
    fields = token.split("\t")
    return len(fields) > _FIELDS and fields[_FIELDS].startswith(ADMITTED_ALONE)


def alone_since_ms(token: str) -> int | None:
    """Time (ms by Redis's clock) of a placement without Redis; None if placed with Redis."""
    if not is_alone(token):
        return None
    digits = token.split("\t")[_FIELDS].removeprefix(ADMITTED_ALONE)
    return int(digits) if digits.isdecimal() else None


def flow_of(token: str) -> str:
    """The flow in an accounting token; '' if `token` is malformed."""
    return _field(token, _FLOW)


def endpoint_of(token: str) -> str:
    """The endpoint in an accounting token; '' if `token` is malformed."""
    return _field(token, _ENDPOINT)


def model_of(token: str) -> str:
    """The model that the client asked for; '' if `token` is malformed."""
    return _field(token, _MODEL)


def load_of(token: str) -> tuple[float, ...]:
    """The endpoint's load when the request was placed; empty if the token has none."""
    return _numbers(_optional(token, PLACED_LOAD).split(","))


def prefill_of(token: str) -> tuple[str, tuple[float, ...]]:
    """The prefill endpoint of a split request, and its load at the placement; '' without a split."""
    prefiller, *load = _optional(token, PREFILL).split(",")
    return prefiller, _numbers(load)


def _numbers(texts: Iterable[str]) -> tuple[float, ...]:
    """The numbers in `texts`; empty if one is no number."""
    try:
        return tuple(map(float, texts))
    except ValueError:
        return ()


def cost_of(token: str) -> float:
    """The cost of the request, in the stock's unit; 0 if `token` is malformed."""
    try:
        cost = float(_field(token, _COST))
    except ValueError:
        return 0.0
    return cost if 0.0 <= cost < float("inf") else 0.0


def prompt_size_of(token: str) -> int | None:
    """The size of the prompt's text (ingress/cost.py); None if usage does not show this text's tokens."""
    digits = _optional(token, PROMPT_SIZE)
    return int(digits) if digits.isdecimal() else None


def _optional(token: str, prefix: str) -> str:
    """The optional field that begins with `prefix`, without the prefix; '' if the token has none."""
    if prefix in token:  # most tokens have few optional fields: do not split the token in vain
        for field in token.split("\t")[_FIELDS:]:
            if field.startswith(prefix):
                return field.removeprefix(prefix)
    return ""


def _field(token: str, at: int) -> str:
    fields = token.split("\t")
    return fields[at] if len(fields) >= _FIELDS else ""


def with_trace(token: str, parent: str) -> str:
    """The `token` with the traceparent `parent` appended, for spans after the request's decision."""
    return f"{token}\t{parent}"


def split_trace(token: str) -> tuple[str, str]:
    """Split `token` into the accounting token as signed and the traceparent; '' without a traceparent."""
    own, _, parent = token.rpartition("\t")
    if parent.startswith(_TRACEPARENT) and token.count("\t") >= _FIELDS:
        return own, parent
    return token, ""
