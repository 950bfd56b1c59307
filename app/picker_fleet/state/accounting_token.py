"""The accounting token, which Envoy carries for a placed request so that any replica can account for it, and
the fleet's keys that sign it.

The token travels in dynamic metadata and returns with each access-log entry. Its fields are joined by tabs,
in the order of state/schema.py; no field can have a tab, since intake refuses control characters. A request
that was placed without Redis has one more field, the time; one whose band is not one of the three has its
priority next. The last field is the fleet's signature over the request's id and all fields before it; a trace
may follow.

The keys are the fleet's, kept in Redis, and also sign session tokens and questions between replicas. Each
heartbeat offers those that this replica holds and takes those in force (lua/heartbeat.lua), so that they
survive the loss of the shared state. The newest key is distributed a whole period before it signs, so that
every replica knows it before it meets a signature. A signature is 28 visible characters: the name of its key
and 96 bits of a keyed BLAKE2b.
"""

import hashlib
import hmac
import secrets
from typing import Final

from picker_fleet.bands import Criticality
from picker_fleet.request import InferenceRequest
from picker_fleet.state.schema import ACCOUNTING_TOKEN, ADMITTED_ALONE, OTHER_PRIORITY

# What is wrong with a token.
NO_TOKEN: Final = "no-token"
UNSIGNED: Final = "unsigned"
UNKNOWN_KEY: Final = "unknown-key"
BAD_SIGNATURE: Final = "bad-signature"

_KEY_BYTES = 16
_NAME = 4  # characters that name the key, so that one check is enough
LENGTH: Final = _NAME + 24  # of a signature

_PURPOSE = "accounting-token"
_TRACEPARENT = "00-"

_NUMBERS = {criticality: str(number) for number, criticality in enumerate(Criticality)}
_FLOW, _COST, _MODEL, _ENDPOINT = map(ACCOUNTING_TOKEN.index, ("flow", "cost", "model", "endpoint"))
_FIELDS = len(ACCOUNTING_TOKEN)  # without the time, the priority, the signature and the trace


class Keyring:
    """The keys that this replica knows. Until it knows the fleet's it uses one of its own.

    `variant_key` chooses the variants of models (traffic_split.py); it stays when the others change.
    `version` grows with each change of the keys.
    """

    def __init__(self) -> None:
        self.version = 0
        self._fresh = secrets.token_hex(_KEY_BYTES)  # a candidate for the fleet's next key
        self._keys: tuple[str, ...] = ()  # newest first
        self._use((self._fresh,))
        self.first = ""  # the pool's first key and when it came, as the heartbeat has them; '' until it does
        self.variant_key = bytes.fromhex(self._fresh)

    def offer(self) -> str:
        """For the heartbeat: an unused key, then the known ones, newest first, separated by blanks."""
        return " ".join((self._fresh, *self._keys))

    def take(self, keys: str, first: str = "") -> None:
        """The heartbeat's answer: the keys in force, newest first, separated by blanks, and `first`."""
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
        # The second: the newest one may not have reached every replica.
        self._name = list(self._macs)[min(1, len(self._macs) - 1)]
        self.version += 1

    def sign(self, purpose: str, text: str) -> str:
        """The signature of `text`, good for `purpose` alone."""
        return self._signature(self._name, purpose, text)

    def signatures(self, purpose: str, text: str) -> list[str]:
        """All signatures of `text` that are good at the moment."""
        return [self._signature(name, purpose, text) for name in self._macs]

    def fault(self, purpose: str, text: str, signature: str) -> str:
        """What is wrong with the `signature` of `text`: a code; '' if nothing is."""
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
    request: InferenceRequest, endpoint: str, answer_tokens: float = 0, alone_ms: int | None = None
) -> str:
    """The accounting token of `request` placed on `endpoint` (`ip:port`).

    `alone_ms` is the time by the clock of the shared state, if the request was placed without Redis.
    `answer_tokens` completes a cost that lacks the answer's part: the mean of the flow is lost together with
    the state that the token restores.
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
    return fields


def signed(token_fields: str, request_id: str, keys: Keyring) -> str:
    """The fields of `write`, with the signature that makes them the token of request `request_id`."""
    signature = keys.sign(_PURPOSE, f"{request_id}\t{token_fields}")
    return f"{token_fields}\t{signature}"


def of_read(request_id: str, keys: Keyring) -> str:
    """The token of a request that is not admitted: without any field."""
    return signed("\t" * (_FIELDS - 1), request_id, keys)


def is_read(token: str) -> bool:
    """Whether it is a token of `of_read`; any other begins with a flow."""
    return token[:1] == "\t"


def fault_of(token: str, request_id: str, keys: Keyring) -> str:
    """What is wrong with the token: '' if it is the fleet's own for `request_id`."""
    own, _ = split_trace(token)
    token_fields, _, signature = own.rpartition("\t")
    if own.count("\t") < _FIELDS:
        signature = ""
    return keys.fault(_PURPOSE, f"{request_id}\t{token_fields}", signature)


def is_alone(token: str) -> bool:
    """Whether its request was placed without Redis."""
    if ADMITTED_ALONE not in token:  # nearly always
        return False
    fields = token.split("\t")
    return len(fields) > _FIELDS and fields[_FIELDS].startswith(ADMITTED_ALONE)


def alone_since_ms(token: str) -> int | None:
    """When its request was placed without Redis, by the clock of the shared state; None if it was not."""
    if not is_alone(token):
        return None
    digits = token.split("\t")[_FIELDS].removeprefix(ADMITTED_ALONE)
    return int(digits) if digits.isdecimal() else None


def flow_of(token: str) -> str:
    """The flow of an accounting token; '' if it is none."""
    fields = token.split("\t")
    return fields[_FLOW] if len(fields) > _ENDPOINT else ""


def endpoint_of(token: str) -> str:
    """The endpoint that an accounting token was written for; '' if it is none."""
    fields = token.split("\t")
    return fields[_ENDPOINT] if len(fields) > _ENDPOINT else ""


def model_of(token: str) -> str:
    """The model that an accounting token's client asked for; '' if it is none."""
    fields = token.split("\t")
    return fields[_MODEL] if len(fields) > _MODEL else ""


def cost_of(token: str) -> float:
    """What the request of a token takes of the stock, in its unit; 0 if it is no token."""
    fields = token.split("\t")
    try:
        cost = float(fields[_COST])
    except (IndexError, ValueError):
        return 0.0
    return cost if 0.0 <= cost < float("inf") else 0.0


def with_trace(token: str, parent: str) -> str:
    """`token` with the traceparent of what comes after the request's decision."""
    return f"{token}\t{parent}"


def split_trace(token: str) -> tuple[str, str]:
    """An accounting token as it was written, and the traceparent it carries; '' if it carries none."""
    own, _, parent = token.rpartition("\t")
    if parent.startswith(_TRACEPARENT) and token.count("\t") >= _FIELDS:
        return own, parent
    return token, ""
