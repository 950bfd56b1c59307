"""Replicas' questions to each other while there is no shared state: one small gRPC method beside Envoy's.

A question is JSON `{"pool", "least", "most", "nonce", "signature"}`, amounts in the stock's unit; the answer
`{"given"}`. What cannot be read is answered with nothing given; so is what the fleet has not signed for
this replica, and what is asked again.
"""

import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import orjson

from picker_fleet.failover.peers import ASK_S
from picker_fleet.signing import Keyring

SERVICE: Final = "picker.fleet.Shares"
_ASK: Final = f"/{SERVICE}/Ask"
_MARGIN_S = 0.5
_LONGEST_BYTES = 1024
_PURPOSE = "share"
_NONCES_KEPT = 10_000


def _signed_text(pool: str, to: str, least: float, most: float, nonce: str) -> str:
    return f"{pool}\n{to}\n{least!r}\n{most!r}\n{nonce}"


def handler(
    pool: str, lend: Callable[[float, float], Awaitable[float]], keys: Keyring, own_address: Callable[[], str]
) -> Any:
    """The service as a grpc.GenericRpcHandler; `lend(least, most)` gives what can be spared of `most`.

    `own_address` is where the others are told to ask this replica, host:port.
    """
    asked_before: OrderedDict[str, None] = OrderedDict()

    async def ask(question: bytes, _: Any) -> bytes:
        return orjson.dumps({"given": await _given(question)})

    async def _given(question: bytes) -> float:
        try:
            asked = orjson.loads(question[:_LONGEST_BYTES])
            least, most = float(asked["least"]), float(asked["most"])
            nonce = str(asked["nonce"])
            text = _signed_text(pool, own_address(), least, most, nonce)
            fault = keys.fault(_PURPOSE, text, str(asked["signature"]))
        except (ValueError, TypeError, KeyError):
            return 0.0
        if fault or nonce in asked_before or not 0 < least <= most:
            return 0.0
        asked_before[nonce] = None
        if len(asked_before) > _NONCES_KEPT:
            asked_before.popitem(last=False)
        return await lend(least, most)

    return grpc.method_handlers_generic_handler(SERVICE, {"Ask": grpc.unary_unary_rpc_method_handler(ask)})


class GrpcPeers:
    """`failover.peers.Peers` over gRPC; a channel for each address, kept until `close`."""

    def __init__(self, pool: str, keys: Keyring) -> None:
        self._pool = pool
        self._keys = keys
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def ask(self, address: str, least: float, most: float) -> float | None:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address)
        nonce = secrets.token_hex(8)
        text = _signed_text(self._pool, address, float(least), float(most), nonce)
        question = orjson.dumps(
            {
                "pool": self._pool,
                "least": least,
                "most": most,
                "nonce": nonce,
                "signature": self._keys.sign(_PURPOSE, text),
            }
        )
        try:
            answer = await channel.unary_unary(_ASK)(question, timeout=ASK_S + _MARGIN_S)
            given = float(orjson.loads(answer)["given"])
        except (grpc.aio.AioRpcError, ValueError, TypeError, KeyError):
            return None
        return given if 0 <= given <= most else 0.0

    async def close(self) -> None:
        """Close every channel; a later question opens its own anew."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()
