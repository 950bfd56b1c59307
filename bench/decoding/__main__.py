"""What it costs to read a body, beside orjson, which builds all of it; honest bodies and hostile ones.

`python -m bench.decoding [--out bench/results/decoding.md]`. Both do the same with what they have read:
model, stream, the answer's maximum. Rounds are interleaved; a figure is CPU time, and the ratio is the median
of the rounds' own ratios with the range of the middle half. Memory is what Python allocates, at its peak.
"""

import argparse
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import orjson

from picker_fleet.errors import BadRequest
from picker_fleet.intake import _MAX_ANSWER, _MOST_ANSWER_TOKENS, MODEL, Ask, _name_fault, read_body
from picker_fleet.request import finite_number

ROUNDS = 15
ROUND_S = 0.02
MIB = 1024 * 1024
LARGEST = 8 * MIB  # extproc.max_body_bytes


def with_orjson(text: bytes) -> Ask:
    """The same, of a body that is built whole, as this project did at first."""
    members = orjson.loads(text)
    if not isinstance(members, dict):
        raise BadRequest("the body must be a JSON object")
    if MODEL not in members:
        raise BadRequest("the body has no model")
    asks_stream = members.get("stream") is True
    model = members[MODEL]
    if not isinstance(model, str):
        raise BadRequest("the model must be a string")
    if fault := _name_fault(model):
        raise BadRequest(f"the model {fault}")
    return Ask(model, asks_stream, None, len(text), _tokens(members))


def _tokens(members: dict[str, object]) -> int | None:
    for name in _MAX_ANSWER:
        number = finite_number(members[name]) if name in members else None
        if number is not None and number >= 1:
            return int(min(number, _MOST_ANSWER_TOKENS))
    return None


def chat(size_bytes: int) -> bytes:
    """A chat of about so many bytes, as clients send it."""
    turns = [{"role": "system", "content": "You are a helpful assistant."}]
    ask = {"model": "llama-3-8b", "messages": turns, "max_tokens": 64, "temperature": 0.7, "stream": True}
    say = "The quick brown fox jumps over the lazy dog. " * 40
    while (missing := size_bytes - len(json.dumps(ask)) - 40) > 0:
        turns.append({"role": "user", "content": say[: min(missing, len(say))]})
    return json.dumps(ask).encode()


def tools(size_bytes: int) -> bytes:
    """A chat with as many tools as make about so many bytes: small values, deep ones."""
    one = {"type": "string", "enum": ["a", "b"]}
    schema = {"type": "object", "properties": {f"p{n}": one for n in range(6)}}
    tool = {"type": "function", "function": {"name": "lookup", "parameters": schema}}
    count = max(1, size_bytes // len(json.dumps(tool)))
    return json.dumps({**json.loads(chat(300)), "tools": [tool] * count}).encode()


def hostile() -> Iterator[tuple[str, bytes]]:
    """Of the largest size that is read."""
    yield "arrays in arrays", b'{"model":"llama","z":[%s[]]}' % (b"[[[]],[[]]]," * (LARGEST // 12 - 10))
    yield "empty objects", b'{"model":"llama","messages":[%s{}]}' % (b"{}," * (LARGEST // 3 - 20))
    yield "a long number", b'{"model":"llama","max_tokens":%s}' % (b"9" * (LARGEST - 100))
    yield "a name in escapes", b'{"model":"%s"}' % (b"\\u0061" * (LARGEST // 6 - 10))
    yield "a long key, not ASCII", b'{"model":"llama","%s":1}' % (b"k" * (LARGEST - 100) + "💩".encode())
    keys = b"".join(b'"k%07d":0,' % n for n in range(LARGEST // 14))
    yield "many keys", b'{"model":"llama",%s"z":0}' % keys


def cpu_us(read: Callable[[bytes], object], text: bytes, times: int) -> float:
    begun_s = time.process_time()
    for _ in range(times):
        with suppress(BadRequest):
            read(text)
    return (time.process_time() - begun_s) / times * 1e6


def peak(read: Callable[[bytes], object], text: bytes) -> float:
    """Bytes allocated at the most, for each byte of `text`."""
    tracemalloc.start()
    with suppress(BadRequest):
        read(text)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most / len(text)


def compared(text: bytes) -> tuple[float, float, list[float]]:
    """µs of CPU with this project's reader and with orjson, and the quartiles of the rounds' ratios."""
    times = max(1, int(ROUND_S / max(cpu_us(with_orjson, text, 3) * 1e-6, 1e-6)))
    rounds = [(cpu_us(read_body, text, times), cpu_us(with_orjson, text, times)) for _ in range(ROUNDS)]
    ratios = statistics.quantiles([ours / theirs for ours, theirs in rounds], n=4)
    ours, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
    return ours, theirs, ratios


def report() -> str:
    lines = ["# Reading a body", "", *(__doc__ or "").strip().splitlines()[2:], ""]
    lines += [
        "| honest body | bytes | µs | orjson µs | ratio | its middle half |",
        "|---|---|---|---|---|---|",
    ]
    chats = [("chat", chat(size)) for size in (300, 1000, 2000, 10_000, 40_000, 400_000)]
    compact = [("chat, compact", orjson.dumps(orjson.loads(text))) for _, text in chats[:3]]
    for name, text in (*chats, *compact, ("tools", tools(3000)), ("tools", tools(40_000))):
        ours, theirs, (low, middle, high) = compared(text)
        ratio = f"{middle:.2f} | {low:.2f} to {high:.2f}"
        lines.append(f"| {name} | {len(text)} | {ours:.1f} | {theirs:.1f} | {ratio} |")
    lines += ["", "| hostile body of 8 MiB | ms | orjson ms | memory, of its size | orjson's |"]
    lines += ["|---|---|---|---|---|"]
    for name, text in hostile():
        ours, theirs = (min(cpu_us(read, text, 1) for _ in range(3)) / 1000 for read in (read_body, _any))
        sizes = f"{peak(read_body, text):.1f} | {peak(_any, text):.1f}"
        lines.append(f"| {name} | {ours:.0f} | {theirs:.0f} | {sizes} |")
    return "\n".join(lines) + "\n"


def _any(text: bytes) -> object:
    try:
        return with_orjson(text)
    except orjson.JSONDecodeError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="a file to write")
    out = parser.parse_args().out
    text = report()
    if out is not None:
        out.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
