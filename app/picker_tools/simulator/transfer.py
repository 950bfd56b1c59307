"""Prefill on one server and decode on another: their messages, the transfer of the KV cache, and the sidecar.

A request with the header `x-prefiller-host-port` goes to a decode server. The decode server's sidecar, whose
work this module does, first makes the server that the header names compute the prompt (`max_tokens: 1`, no
stream, `kv_transfer_params` with `do_remote_decode`). The prefill server keeps the prompt's KV blocks and
names them in `kv_transfer_params` of its answer. Once the decode server has room, it pulls the blocks and
then notifies the prefill server, which frees them. If the prefill server does not answer 200, or has lost the
blocks, the decode server computes the prompt itself.

Sources: llm-d's sidecar (github.com/llm-d/llm-d-router, pkg/sidecar/proxy, connector nixlv2; its fallback to
the decode server was in versions up to 0.8 and is an error in later ones), and vLLM's NixlConnector, which
keeps blocks for at most VLLM_NIXL_ABORT_REQUEST_TIMEOUT, and whose decode server also frees the blocks of an
abandoned request. Here the message that frees blocks goes to the path `/sim`, not to NIXL's side channel.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import orjson

from picker_tools.simulator.engine import Sequence
from picker_tools.simulator.openai_api import KvTransfer

PREFILLER_HEADER = b"x-prefiller-host-port"
# Bytes of one token in the KV cache of OPT-13B, the model of batch.py: in each of 40 layers, a key and a
# value of 5120 numbers of 16 bits.
KV_BYTES_PER_TOKEN = 2 * 40 * 5120 * 2
# The speed of one InfiniBand port of 200 Gbit/s; a DGX A100 has one for each GPU.
KV_BANDWIDTH_GB_S = 25.0
KEPT_S = 480.0  # seconds for which blocks are kept: vLLM's default of VLLM_NIXL_ABORT_REQUEST_TIMEOUT
_CONNECT_S = 2.0


class KeptBlocks:
    """The KV blocks that a prefill server keeps for decode servers, for at most `KEPT_S` seconds. `free`
    frees the blocks of a sequence."""

    def __init__(self, free: Callable[[Sequence], None]) -> None:
        self._free = free
        self._engine_id = uuid.uuid4().hex
        self._kept: dict[str, tuple[Sequence, asyncio.TimerHandle]] = {}

    def keep(self, sequence: Sequence, host: str, port: int) -> KvTransfer:
        """Keep the blocks of the complete `sequence`. Returns the parameters for its decode server."""
        name = uuid.uuid4().hex
        timer = asyncio.get_running_loop().call_later(KEPT_S, self.free, name)
        self._kept[name] = sequence, timer
        return KvTransfer(
            do_remote_prefill=True,
            remote_engine_id=self._engine_id,
            remote_request_id=name,
            remote_host=host,
            remote_port=port,
        )

    def free(self, name: str) -> bool:
        """Free the blocks kept as `name`. Returns False if no blocks are kept as `name`."""
        sequence, timer = self._kept.pop(name, (None, None))
        if sequence is None or timer is None:
            return False
        timer.cancel()
        self._free(sequence)
        return True


class Link:
    """A decode server's network port, which carries one transfer after another, at `gb_s` · 10⁹ bytes/s."""

    def __init__(self, gb_s: float) -> None:
        self._token_s = KV_BYTES_PER_TOKEN / (gb_s * 1e9)
        self._free_at_s = 0.0

    async def carry(self, tokens: int, slowdown: float) -> None:
        """Wait until the KV cache of `tokens` tokens has arrived."""
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(self._free_at_s, now_s) + tokens * self._token_s * slowdown
        await asyncio.sleep(self._free_at_s - now_s)


class Pull:
    """The transfer of one prompt's KV cache from the server named in `source` through `link`."""

    def __init__(self, source: KvTransfer, link: Link) -> None:
        self._source = source
        self._link = link
        self._is_over = False

    async def run(self, tokens: int, slowdown: float) -> bool:
        """Transfer `tokens` tokens, and free the source's blocks. Returns False if the blocks were lost."""
        await self._link.carry(tokens, slowdown)
        self._is_over = True
        return await self._free()

    async def abandon(self) -> None:
        """Free the source's blocks if the request ended before its transfer."""
        if not self._is_over:
            self._is_over = True
            await self._free()

    async def _free(self) -> bool:
        source = self._source
        body = orjson.dumps({"pulled": source.remote_request_id})
        return await _post(f"{source.remote_host}:{source.remote_port}", "/sim", body) is not None


async def prefilled(prefiller: str, path: str, body: bytes, request_id: str) -> tuple[KvTransfer, int] | None:
    """Make the server at `prefiller` (`host:port`) compute the prompt of the valid request `body`.

    Returns where the prompt's KV cache is, and the number of prompt tokens that were cached there; None if
    the server did not compute the prompt.
    """
    tree: dict[str, Any] = orjson.loads(body)
    tree |= {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
    if tree.get("max_completion_tokens") is not None:
        tree["max_completion_tokens"] = 1
    tree.pop("stream_options", None)
    answer = await _post(prefiller, path, orjson.dumps(tree), request_id)
    if answer is None:
        return None
    try:
        found = msgspec.json.decode(answer, type=_Prefilled)
    except msgspec.MsgspecError:
        return None
    return found.kv_transfer_params, found.usage.prompt_tokens_details.cached_tokens


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details


class _Prefilled(msgspec.Struct):
    """The part of a prefill server's answer that the sidecar reads."""

    kv_transfer_params: KvTransfer
    usage: _Usage


async def _post(address: str, path: str, body: bytes, request_id: str = "") -> bytes | None:
    """The body of the answer to a POST; None without an answer with status 200."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError, ValueError, OverflowError):
        return None
    with contextlib.closing(writer):
        names = f"x-request-id: {request_id}\r\n" if request_id else ""
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n{names}"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        try:
            writer.write(head.encode("latin-1") + body)
            answer = await reader.read()
        except OSError:
            return None
    start, _, rest = answer.partition(b"\r\n\r\n")
    return rest if start.startswith(b"HTTP/1.1 200 ") else None
