"""Budget transfers between replicas while Redis is unavailable: a small gRPC service on Envoy's port.

Requests and responses are JSON objects. Each request has `pool`, `nonce` and `signature`. A replica accepts
a request once, and only if the fleet's key has signed it for that replica. A repeated `Ask` whose first
response was late gets the same response. Amounts are in the stock's unit.

    Ask least, most {"given"}: budget that the called replica gives up, 0 if it has none to spare
    Count               {"live", "bound", "free", "running"} of `OutageCount`; {} if the replica has none
    Ended  ids          {"ended"}: the `ids` whose end the replica received before its outage; {} outside one
    EndedSince  ids     {"ended"}: id -> `EndedCharge` of the `ids` whose end the replica received in its
                        outage; {} outside one
    UsesRedis           {"uses", "local_s"} of `RedisUse`; {} if the request is not signed

A request also names its pool in gRPC metadata (`budgets.POOL_HEADER`), to reach the handlers of that pool.
The function `handlers` serves the requests; failover.py sends requests by the class `GrpcPeers`.
"""

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final

import orjson

from picker_fleet.admission.peers import TRANSFER_WAIT_S, EndedCharge, OutageCount, RedisUse
from picker_fleet.domain.budgets import POOL_HEADER
from picker_fleet.grpc.certificates import Certificates
from picker_fleet.grpc.client import LONGEST_QUESTION, call
from picker_fleet.grpc.transport import Handler, Stream
from picker_fleet.state.accounting_token import Keyring

SERVICE: Final = "picker.fleet.Shares"
_ASK, _COUNT, _ENDED, _ENDED_SINCE, _USES = (
    f"/{SERVICE}/{name}" for name in ("Ask", "Count", "Ended", "EndedSince", "UsesRedis")
)
_LONGEST_BYTES = 1024
_IDS_BYTES = LONGEST_QUESTION - _LONGEST_BYTES  # bytes for the ids in one request; other fields are short
_LONGEST_LIST_BYTES = 256 * 1024
_PURPOSE = "share"
_NONCES_KEPT = 10_000
_ASKED_TIMES = 30  # maximum calls for one budget transfer while no response arrives

Fields = Mapping[str, Any]


def _signed_text(pool: str, to: str, method: str, fields: Fields) -> str:
    """The text that a request's signature covers: pool, called replica, method and all other fields."""
    covered = {name: value for name, value in fields.items() if name != "signature"}
    digest = hashlib.blake2b(orjson.dumps(covered, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()
    return f"{pool}\n{to}\n{method}\n{digest}"


def _in_parts(names: Iterable[str], most_bytes: int) -> Iterator[list[str]]:
    """Split `names` into lists of at most `most_bytes` of JSON each; yields at least one list."""
    part: list[str] = []
    room = most_bytes
    for name in names:
        size = len(orjson.dumps(name)) + 1
        if part and size > room:
            yield part
            part, room = [], most_bytes
        part.append(name)
        room -= size
    yield part


def handlers(
    pool: str,
    transfer: Callable[[float, float], Awaitable[float]],
    keys: Keyring,
    own_address: Callable[[], str],
    *,
    count: Callable[[], OutageCount | None] = lambda: None,
    ended_before: Callable[[Collection[str]], list[str] | None] = lambda ids: None,
    ended: Callable[[Collection[str]], Mapping[str, EndedCharge] | None] = lambda ids: None,
    redis_use: Callable[[], RedisUse] = lambda: RedisUse(False, 0.0),
) -> Mapping[str, Handler]:
    """The gRPC handlers of the budget service, by path. The callback `transfer(least, most)` gives away
    between `least` and `most` of the replica's budget.

    `own_address` returns the host:port by which peers know this replica.
    """
    seen_nonces: OrderedDict[str, None] = OrderedDict()
    transfers: OrderedDict[str, asyncio.Task[float]] = OrderedDict()  # by nonce

    def checked(method: str, request: bytes) -> Fields | None:
        """The fields of `request`; None if it is malformed, repeated or not signed by the fleet."""
        try:
            fields: dict[str, Any] = orjson.loads(
                request[: _LONGEST_LIST_BYTES if method in (_ENDED, _ENDED_SINCE) else _LONGEST_BYTES]
            )
            nonce = str(fields["nonce"])
            text = _signed_text(pool, own_address(), method, fields)
            fault = keys.fault(_PURPOSE, text, str(fields["signature"]))
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
        if fault or (nonce in seen_nonces and nonce not in transfers):
            return None
        seen_nonces[nonce] = None
        if len(seen_nonces) > _NONCES_KEPT:
            transfers.pop(seen_nonces.popitem(last=False)[0], None)
        return fields

    async def ask(stream: Stream) -> bytes:
        fields = checked(_ASK, await stream.read() or b"")
        if fields is None or not 0 < float(fields["least"]) <= float(fields["most"]):
            return orjson.dumps({"given": 0.0})
        nonce = str(fields["nonce"])
        if nonce not in transfers:
            least, most = float(fields["least"]), float(fields["most"])
            transfers[nonce] = asyncio.ensure_future(transfer(least, most))
        # If the caller times out, the transfer continues, and the caller repeats its call to get the result.
        return orjson.dumps({"given": await asyncio.shield(transfers[nonce])})

    async def answer_count(stream: Stream) -> bytes:
        own = count() if checked(_COUNT, await stream.read() or b"") is not None else None
        return orjson.dumps(asdict(own) if own is not None else {})

    def answer_ended(method: str, find: Callable[[Collection[str]], object]) -> Handler:
        async def answer(stream: Stream) -> bytes:
            fields = checked(method, await stream.read() or b"")
            found = find(fields["ids"]) if fields is not None else None
            return orjson.dumps({"ended": found} if found is not None else {})

        return answer

    async def answer_uses(stream: Stream) -> bytes:
        is_signed = checked(_USES, await stream.read() or b"") is not None
        return orjson.dumps(redis_use()._asdict() if is_signed else {})

    return {
        _ASK: ask,
        _COUNT: answer_count,
        _ENDED: answer_ended(_ENDED, ended_before),
        _ENDED_SINCE: answer_ended(_ENDED_SINCE, ended),
        _USES: answer_uses,
    }


class GrpcPeers:
    """Implements `peers.PeerClient` by gRPC, with TLS if `certificates` are given. Each call opens its own
    connection, and waits for an answer for `margin_s` longer than the peer may take.
    """

    def __init__(
        self, pool: str, keys: Keyring, certificates: Certificates | None = None, margin_s: float = 0.5
    ) -> None:
        self._timeout_s = TRANSFER_WAIT_S + margin_s
        self._tls = certificates.client_context if certificates is not None else None
        self._pool = pool
        self._keys = keys

    async def ask(self, address: str, least: float, most: float) -> float | None:
        request = self._request(_ASK, address, {"least": least, "most": most})
        for _ in range(_ASKED_TIMES):
            try:
                answer = await self._answer(_ASK, address, request)
            except TimeoutError:
                continue  # the peer may have given budget, so repeat the call to get the response
            given = answer.get("given") if answer is not None else None
            if not isinstance(given, int | float):
                return None
            return given if 0 <= given <= most else 0.0
        return None

    async def count(self, address: str) -> OutageCount | None:
        answer = await self._call(_COUNT, address, {})
        try:
            return OutageCount(**answer) if answer else None
        except TypeError:
            return None

    async def redis_use(self, address: str) -> RedisUse | None:
        match await self._call(_USES, address, {}):
            case {"uses": bool(uses), "local_s": float(local_s)}:
                return RedisUse(uses, local_s)
        return None

    async def ended_before(self, address: str, ids: Collection[str]) -> Collection[str] | None:
        parts = await self._ended(_ENDED, address, ids, list)
        return None if parts is None else [request_id for part in parts for request_id in part]

    async def ended(self, address: str, ids: Collection[str]) -> Mapping[str, EndedCharge] | None:
        parts = await self._ended(_ENDED_SINCE, address, ids, dict)
        try:
            return (
                None
                if parts is None
                else {i: EndedCharge(**row) for part in parts for i, row in part.items()}
            )
        except TypeError:
            return None

    async def _ended(self, method: str, address: str, ids: Collection[str], kind: type) -> list[Any] | None:
        """The parts of the response about `ids`, each of the type `kind`."""
        parts = []
        for some in _in_parts(ids, _IDS_BYTES):
            answer = await self._call(method, address, {"ids": some})
            if not answer or not isinstance(answer.get("ended"), kind):
                return None
            parts.append(answer["ended"])
        return parts

    async def _call(self, method: str, address: str, fields: Fields) -> dict[str, Any] | None:
        """The response to a request that changes nothing; None if no response arrives."""
        try:
            return await self._answer(method, address, self._request(method, address, fields))
        except TimeoutError:
            return None

    def _request(self, method: str, address: str, fields: Fields) -> bytes:
        signed = {"pool": self._pool, **fields, "nonce": secrets.token_hex(8)}
        signature = self._keys.sign(_PURPOSE, _signed_text(self._pool, address, method, signed))
        return orjson.dumps({**signed, "signature": signature})

    async def _answer(self, method: str, address: str, request: bytes) -> dict[str, Any] | None:
        """The peer's response; None if the call failed or the response is no JSON object.

        Raises:
            TimeoutError: the peer may or may not have received the request.
        """
        try:
            answer = orjson.loads(await self._send(method, address, request))
        except TimeoutError:
            raise
        except (OSError, ValueError):
            return None
        return answer if isinstance(answer, dict) else None

    async def _send(self, method: str, address: str, request: bytes) -> bytes:
        tls = None if self._tls is None else self._tls()
        return await call(address, method, request, tls, self._timeout_s, {POOL_HEADER: self._pool})
