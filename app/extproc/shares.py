"""Replicas' questions to each other while there is no shared state: one small gRPC method beside Envoy's.

A question is JSON `{"pool", "least", "most"}`, amounts in the stock's unit; the answer `{"given"}`. What
cannot be read is answered with nothing given.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import orjson

from app.admission.borrowing import ASK_S

SERVICE: Final = "picker.fleet.Shares"
_ASK: Final = f"/{SERVICE}/Ask"
_MARGIN_S = 0.5
_LONGEST_BYTES = 1024


def handler(pool: str, lend: Callable[[float, float], Awaitable[float]]) -> Any:
    """The service as a grpc.GenericRpcHandler; `lend(least, most)` gives what can be spared of `most`."""

    async def ask(question: bytes, _: Any) -> bytes:
        return orjson.dumps({"given": await _given(question)})

    async def _given(question: bytes) -> float:
        try:
            asked = orjson.loads(question[:_LONGEST_BYTES])
            least, most = float(asked["least"]), float(asked["most"])
            mine = asked["pool"] == pool
        except (ValueError, TypeError, KeyError):
            return 0.0
        return await lend(least, most) if mine and 0 < least <= most else 0.0

    return grpc.method_handlers_generic_handler(SERVICE, {"Ask": grpc.unary_unary_rpc_method_handler(ask)})


class GrpcPeers:
    """`app.admission.borrowing.Peers` over gRPC; a channel for each address, kept until `close`."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def ask(self, address: str, least: float, most: float) -> float | None:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address)
        question = orjson.dumps({"pool": self._pool, "least": least, "most": most})
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
