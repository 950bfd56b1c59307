"""Budget transfers between replicas while Redis is away: one small gRPC method beside Envoy's services.

A request is JSON `{"pool", "least", "most", "nonce", "signature"}`, amounts in the stock's unit; the response
is `{"given"}`. It is 0 for a malformed or repeated request and for one without the fleet's signature for this
replica. `handler` serves it; failover asks through `GrpcPeers`.
"""

import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import grpc
import orjson

from picker_fleet.extproc.certificates import Certificates
from picker_fleet.extproc.tls_call import call
from picker_fleet.extproc.transport import Handler, Stream
from picker_fleet.failover.peers import TRANSFER_WAIT_S
from picker_fleet.state.accounting_token import Keyring

SERVICE: Final = "picker.fleet.Shares"
_ASK: Final = f"/{SERVICE}/Ask"
_MARGIN_S = 0.5
_LONGEST_BYTES = 1024
_PURPOSE = "share"
_NONCES_KEPT = 10_000


def _signed_text(pool: str, to: str, least: float, most: float, nonce: str) -> str:
    return f"{pool}\n{to}\n{least!r}\n{most!r}\n{nonce}"


def handlers(
    pool: str,
    transfer: Callable[[float, float], Awaitable[float]],
    keys: Keyring,
    own_address: Callable[[], str],
) -> Mapping[str, Handler]:
    """The service, by path; `transfer(least, most)` gives up to `most`.

    `own_address` is this replica's address as its peers know it, host:port.
    """
    seen_nonces: OrderedDict[str, None] = OrderedDict()

    async def answer(stream: Stream) -> bytes:
        return orjson.dumps({"given": await _given(await stream.read() or b"")})

    async def _given(request: bytes) -> float:
        try:
            fields = orjson.loads(request[:_LONGEST_BYTES])
            least, most = float(fields["least"]), float(fields["most"])
            nonce = str(fields["nonce"])
            text = _signed_text(pool, own_address(), least, most, nonce)
            fault = keys.fault(_PURPOSE, text, str(fields["signature"]))
        except (ValueError, TypeError, KeyError):
            return 0.0
        if fault or nonce in seen_nonces or not 0 < least <= most:
            return 0.0
        seen_nonces[nonce] = None
        if len(seen_nonces) > _NONCES_KEPT:
            seen_nonces.popitem(last=False)
        return await transfer(least, most)

    return {_ASK: answer}


class GrpcPeers:
    """`failover.peers.PeerClient` over gRPC; one channel an address, kept until `close`.

    With `certificates` replicas speak TLS, and each call has a connection of its own.
    """

    def __init__(self, pool: str, keys: Keyring, certificates: Certificates | None = None) -> None:
        self._tls = certificates.client_context if certificates is not None else None
        self._pool = pool
        self._keys = keys
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def ask(self, address: str, least: float, most: float) -> float | None:
        nonce = secrets.token_hex(8)
        text = _signed_text(self._pool, address, float(least), float(most), nonce)
        request = orjson.dumps(
            {
                "pool": self._pool,
                "least": least,
                "most": most,
                "nonce": nonce,
                "signature": self._keys.sign(_PURPOSE, text),
            }
        )
        try:
            answer = await self._call(address, request, TRANSFER_WAIT_S + _MARGIN_S)
            given = float(orjson.loads(answer)["given"])
        except (grpc.aio.AioRpcError, OSError, ValueError, TypeError, KeyError):
            return None
        return given if 0 <= given <= most else 0.0

    async def _call(self, address: str, request: bytes, timeout_s: float) -> bytes:
        if self._tls is not None:
            return await call(address, _ASK, request, self._tls(), timeout_s)
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address)
        answer: bytes = await channel.unary_unary(_ASK)(request, timeout=timeout_s)
        return answer

    async def close(self) -> None:
        """Close every channel; the next `ask` opens its own."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()
