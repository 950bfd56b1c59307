"""What a source sends: headers and body of each request. Pure, seeded by source and number."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import orjson

from picker_tools.load.scenario import Source

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_WORDS = ("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliett")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as it goes out. `answer_tokens` is what it asks for."""

    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    streamed: bool
    answer_tokens: int


def ask(source: Source, model: str, number: int, seed: int) -> Ask:
    """Request `number` of `source`: a prompt of its own, so that no prompt repeats another."""
    chance = Random(f"{seed}/{source.name}/{number}")
    streamed = chance.random() < source.streamed
    tree = {
        "model": model,
        "prompt": f"{source.name} {number} {_text(source, chance)}",
        "max_tokens": source.answer_tokens,
        "stream": streamed,
    }
    return Ask(COMPLETIONS, headers(source), orjson.dumps(tree), streamed, source.answer_tokens)


def turn(source: Source, model: str, said: Sequence[str], chance: Random) -> tuple[Ask, str]:
    """The next turn of a conversation in which `said` was said in turn, and what the user says in it."""
    streamed = chance.random() < source.streamed
    words = _text(source, chance)
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate((*said, words))]
    tree: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": source.answer_tokens,
        "stream": streamed,
    }
    return Ask(CHAT, headers(source), orjson.dumps(tree), streamed, source.answer_tokens), words


def headers(source: Source) -> tuple[tuple[str, str], ...]:
    """Who asks, in the names of docs/protocol.md."""
    sent = [
        ("x-gateway-inference-fairness-id", source.flow),
        ("x-llm-d-inference-ttl", f"{source.ttl_s:g}s"),
    ]
    if source.objective:
        sent.append(("x-gateway-inference-objective", source.objective))
    if source.workload:
        context = {"workload_id": source.workload, "criticality": source.criticality}
        sent.append(("x-workload-context", orjson.dumps(context).decode()))
    return tuple(sent)


def _text(source: Source, chance: Random) -> str:
    low, high = source.prompt_bytes
    size = round(math.exp(chance.uniform(math.log(low), math.log(high))))
    # One run of random words, repeated: random throughout would cost more than the sending.
    run = " ".join(chance.choices(_WORDS, k=64))
    return (f"{run} " * (size // len(run) + 1))[:size]
