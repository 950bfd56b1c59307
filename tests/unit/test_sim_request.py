"""The body of a request to the simulated server: what is parsed, and what is refused."""

import orjson
import pytest

from picker_tools.simulator.request import ApiError, CompletionRequest, parse

HI = [{"role": "user", "content": "hi"}]


def completion(**keys: object) -> CompletionRequest:
    body = {"model": "llama", "prompt": "hello to you", **keys}
    return parse(orjson.dumps(body), chat=False, models={"llama"})


def chat(**keys: object) -> CompletionRequest:
    return parse(orjson.dumps({"model": "llama", "messages": HI, **keys}), chat=True, models={"llama"})


def test_a_completion_defaults_to_16_tokens_without_streaming() -> None:
    request = completion()
    assert (request.max_tokens, request.stream, request.include_usage, request.finish_reason) == (
        16,
        False,
        False,
        "length",
    )
    assert request.prompt_tokens == len("hello to you") // 4


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
    parts = [{"type": "text", "text": "b" * 40}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    messages = [
        {"role": "system", "content": "a" * 40},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
    ]
    request = chat(messages=messages)
    assert b"a" * 40 in request.prompt
    assert b"b" * 40 in request.prompt
    assert request.prompt_tokens >= 20
    assert request.finish_reason == "stop"


def test_either_name_limits_a_chat_and_the_newer_one_wins() -> None:
    assert chat(max_tokens=3).max_tokens == 3
    assert chat(max_completion_tokens=4).max_tokens == 4
    assert chat(max_completion_tokens=4, max_tokens=9).max_tokens == 4
    assert chat(max_tokens=None).max_tokens == 16
    assert chat(max_tokens=3).finish_reason == "length"


def test_unknown_keys_are_ignored() -> None:
    assert completion(ignore_eos=True, temperature=0.1, n=1, unknown={"a": []}) == completion()


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
def test_a_malformed_completion_is_refused_and_the_key_is_named(body: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=message) as refused:
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
    with pytest.raises(ApiError) as refused:
        chat(messages=messages)
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(ApiError, match="'gpt' does not exist") as refused:
        completion(model="gpt")
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
