"""What a simulated server reads out of a body, and what it refuses."""

import orjson
import pytest

from picker_tools.simulator.ask import Ask, parse
from picker_tools.simulator.refusal import Refusal

HI = [{"role": "user", "content": "hi"}]


def completion(**keys: object) -> Ask:
    body = {"model": "llama", "prompt": "tell me more", **keys}
    return parse(orjson.dumps(body), chat=False, models={"llama"})


def chat(**keys: object) -> Ask:
    return parse(orjson.dumps({"model": "llama", "messages": HI, **keys}), chat=True, models={"llama"})


def test_a_completion_has_its_defaults() -> None:
    # When nothing but model and prompt is given, then sixteen tokens, not streamed, cut at the limit
    asked = completion()
    assert (asked.max_tokens, asked.stream, asked.include_usage, asked.finish_reason) == (
        16,
        False,
        False,
        "length",
    )
    assert asked.prompt_tokens == len("tell me more") // 4


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("", 1),
        ("abc", 1),
        ("é" * 8, 4),
        (["one text"], 2),
        ([1, 2, 3], 3),
        ([[4, 5]], 2),
        ([7], 1),
        ("x" * 400_000, 100_000),
    ],
)
def test_prompt_tokens_follow_its_bytes_or_ids(prompt: object, tokens: int) -> None:
    assert completion(prompt=prompt).prompt_tokens == tokens


def test_chat_counts_the_text_of_every_message() -> None:
    # Given text, parts, an image and an empty assistant turn
    parts = [{"type": "text", "text": "b" * 40}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    messages = [
        {"role": "system", "content": "a" * 40},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
    ]
    # When it is read, then the texts are in the prompt, and the answer would end by itself
    asked = chat(messages=messages)
    assert b"a" * 40 in asked.prompt
    assert b"b" * 40 in asked.prompt
    assert asked.prompt_tokens >= 20
    assert asked.finish_reason == "stop"


def test_either_name_limits_a_chat_and_the_newer_one_wins() -> None:
    assert chat(max_tokens=3).max_tokens == 3
    assert chat(max_completion_tokens=4).max_tokens == 4
    assert chat(max_completion_tokens=4, max_tokens=9).max_tokens == 4
    assert chat(max_tokens=None).max_tokens == 16
    assert chat(max_tokens=3).finish_reason == "length"


def test_keys_without_meaning_here_are_ignored() -> None:
    assert completion(ignore_eos=True, temperature=0.1, n=1, unheard_of={"a": []}) == completion()


def test_usage_is_asked_for_in_stream_options() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={}).include_usage


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON"),
        (b'{"model": "llama"', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 5000, "not JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"prompt": "x"}', "model must be"),
        (b'{"model": 7, "prompt": "x"}', "model must be"),
        (b'{"model": "llama"}', "prompt must be"),
        (b'{"model": "llama", "prompt": []}', "prompt must be"),
        (b'{"model": "llama", "prompt": ["a", "b"]}', "prompt must be"),
        (b'{"model": "llama", "prompt": [1, true]}', "prompt must be"),
        (b'{"model": "llama", "prompt": "x", "max_tokens": 0}', "max_tokens must be"),
        (b'{"model": "llama", "prompt": "x", "max_tokens": -1}', "max_tokens must be"),
        (b'{"model": "llama", "prompt": "x", "max_tokens": 1.5}', "max_tokens must be"),
        (b'{"model": "llama", "prompt": "x", "max_tokens": "8"}', "max_tokens must be"),
        (b'{"model": "llama", "prompt": "x", "max_tokens": true}', "max_tokens must be"),
        (b'{"model": "llama", "prompt": "x", "n": 2}', "n must be 1"),
        (b'{"model": "llama", "prompt": "x", "stream": "yes"}', "stream must be"),
        (b'{"model": "llama", "prompt": "x", "stream_options": 1}', "stream_options must be"),
    ],
)
def test_a_malformed_completion_is_refused_by_the_name_of_its_fault(body: bytes, message: str) -> None:
    with pytest.raises(Refusal, match=message) as refused:
        parse(body, chat=False, models={"llama"})
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        ["hi"],
        [{"content": "hi"}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"text": 1}]}],
    ],
)
def test_malformed_messages_are_refused(messages: object) -> None:
    with pytest.raises(Refusal) as refused:
        chat(messages=messages)
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(Refusal, match="'gpt' does not exist") as refused:
        completion(model="gpt")
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
