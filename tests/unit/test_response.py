"""Responses to the client: token usage, ids of stored state, and the restored model name."""

import gzip
import json
import time
import zlib
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import cases

from picker_fleet.ingress.ext_proc.response import ModelRename, StateIds, UsageReader

Counts = tuple[int | None, ...]


def counts(answer: bytes, size: int = 1000, encoding: bytes = b"") -> Counts:
    """The numbers of prompt and answer tokens read from `answer` in chunks of `size` bytes."""
    reader = UsageReader()
    if encoding:
        reader.encoded(encoding)
    for at in range(0, len(answer), size):
        reader.add(answer[at : at + size])
    return reader.tokens()[:2]


def events(*documents: object) -> bytes:
    return b"".join(b"event: x\ndata: %s\n\n" % json.dumps(each).encode() for each in documents)


CACHED = {
    "OpenAI": {"usage": {"prompt_tokens": 7, "completion_tokens": 9,
                         "prompt_tokens_details": {"cached_tokens": 5}}},
    "Responses": {"response": {"usage": {"input_tokens": 7, "output_tokens": 9,
                                         "input_tokens_details": {"cached_tokens": 5}}}},
    "Anthropic": {"usage": {"input_tokens": 1, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 1,
                            "output_tokens": 9}},
    "Bedrock": {"usage": {"inputTokens": 2, "outputTokens": 9, "totalTokens": 16, "cacheReadInputTokens": 5}},
}  # fmt: skip


@pytest.mark.parametrize("answer", CACHED.values(), ids=CACHED.keys())
def test_the_prompts_tokens_that_came_from_a_cache_are_read(answer: object) -> None:
    for text in (json.dumps(answer).encode(), b"data: {}\n\ndata: %s\n\n" % json.dumps(answer).encode()):
        reader = UsageReader()
        reader.add(text)
        assert reader.tokens()[1:] == (9, 5)


LONG = "word " * 20_000
TOKENS = {"input_tokens": 7, "output_tokens": 9}
OPENAI = {"usage": {"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 16}}
FALSE = {"usage": {"prompt_tokens": 1, "completion_tokens": 1}}
CLAUDE = {"input_tokens": 150, "cache_read_input_tokens": 700, "cache_creation_input_tokens": 50}
FIRST = {"type": "message_start", "message": {"model": "m", "usage": {**CLAUDE, "output_tokens": 1}}}
TEXT = {"type": "content_block_delta", "delta": {"text": "word " * 30}}
DELTA = {"type": "message_delta", "usage": {"output_tokens": 50}}

ANSWERS: dict[str, tuple[object, Counts]] = {
    "embeddings": ({"usage": {"prompt_tokens": 8, "total_tokens": 8}}, (8, 0)),
    "rerank": ({"results": [], "usage": {"total_tokens": 8}}, (8, 0)),
    "Cohere": ({"usage": {"billed_units": {"input_tokens": 1}, "tokens": TOKENS}}, (7, 9)),
    "Anthropic": ({"usage": {**CLAUDE, "output_tokens": 50}}, (900, 50)),
    "Ollama": ({"done": True, "prompt_eval_count": 7, "eval_count": 9}, (7, 9)),
    "Gemini": ({"usageMetadata": {"promptTokenCount": 7, "candidatesTokenCount": 9}}, (7, 9)),
    "TGI": ([{"details": {"generated_tokens": 9, "input_length": 7, "tokens": [{}] * 3000}}], (7, 9)),
    "SGLang, two prompts": ([{"meta_info": {"prompt_tokens": 3, "completion_tokens": 4}}] * 2, (6, 8)),
    "long text after the usage": ({"a": LONG, **OPENAI, "prompt_logprobs": LONG}, (7, 9)),
    "long text around the usage": ({"a": LONG[:9000], **OPENAI, "b": LONG[:40_000]}, (7, 9)),
    "a usage in a tool's input": ({**OPENAI, "content": [{"type": "tool_use", "input": FALSE}]}, (7, 9)),
    "a usage in a string": ({"text": json.dumps(FALSE), **OPENAI}, (7, 9)),
    "no usage": ({"choices": [{"message": {"content": "usage"}}]}, (None, None)),
}  # fmt: skip


@pytest.mark.parametrize("size", [1000, 62_000])
@cases("answer, expected", ANSWERS)
def test_the_tokens_of_a_plain_answer_are_read_in_each_api(
    answer: object, expected: Counts, size: int
) -> None:
    for indent in (None, 2):
        assert counts(json.dumps(answer, indent=indent).encode(), size) == expected


STREAMS: dict[str, tuple[bytes, Counts]] = {
    "OpenAI": (events(*[{"usage": None}] * 99, OPENAI) + b"data: [DONE]\n\n", (7, 9)),
    "an event of several lines": (
        b"data: %b\r\n\r\n" % json.dumps(OPENAI, indent=1).encode().replace(b"\n", b"\r\ndata: "), (7, 9)),
    "Responses": (events({"response": {"output": LONG, "usage": TOKENS}}), (7, 9)),
    "Anthropic": (events(FIRST, *[TEXT] * 5, DELTA), (900, 50)),
    "Anthropic, long": (events(FIRST, *[TEXT] * 500, DELTA), (900, 50)),
    "Anthropic, 0 at the end": (
        events(FIRST, *[TEXT] * 500, {"usage": {"input_tokens": 0, "output_tokens": 50}}), (900, 50)),
    "TGI": (events({"token": {}}, {"details": {"generated_tokens": 9, "input_length": 7}}), (7, 9)),
    "Ollama": (b'{"message":{"content":"a"},"done":false}\n' * 999
               + b'{"done":true,"prompt_eval_count":7,"eval_count":9}\n', (7, 9)),
}  # fmt: skip


@cases("answer, expected", STREAMS)
def test_the_tokens_of_a_stream_are_added_up_in_each_api(answer: bytes, expected: Counts) -> None:
    assert counts(answer, 170) == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        *((count, count) for count in (0, 100, 1_000_000_000)),
        *((count, None) for count in (1_000_000_001, 10**300, -1, True, "100", 1.5)),
    ],
)
def test_an_implausible_token_count_is_treated_as_unknown(count: object, expected: int | None) -> None:
    answer = {"usage": {"prompt_tokens": 7, "completion_tokens": count}}
    assert counts(json.dumps(answer).encode()) == (7, expected)


@pytest.mark.parametrize("answer", [json.dumps(OPENAI | {"a": LONG}).encode(), STREAMS["OpenAI"][0]])
def test_the_usage_of_a_compressed_answer_is_read_unless_it_is_a_bomb(answer: bytes) -> None:
    assert counts(gzip.compress(answer), 100, b"gzip") == (7, 9)
    assert counts(zlib.compress(answer), 100, b"deflate") == (7, 9)
    assert counts(gzip.compress(bytes(50_000_000) + answer, 1), 10_000_000, b"gzip") == (None, None)
    for damaged in (answer, gzip.compress(answer)[:50] + answer):
        assert counts(damaged, 100, b"gzip") == (None, None)


def test_the_work_of_renaming_a_model_is_charged_by_the_tokens_of_the_text() -> None:
    charged: list[int] = []
    rename = ModelRename("target", "mine", charged.append)
    rename.push(b'{"text":"%s",' % (b"x" * 16_000), ended=False)
    rename.push(b'"more":[%s' % (b"{}," * 500), ended=False)
    assert charged[0] < 10 < 400 < charged[1]


def test_a_chunk_of_too_many_brackets_ends_the_renaming_and_loses_no_byte() -> None:
    chunks = [
        b'{"mo',
        b'del":"target","x":[',
        b"[]," * 5000 + b'"tar',
        b'get"],"message":{"model":"target"}}',
    ]
    rename, began_s = ModelRename("target", "mine"), time.thread_time()
    sent = b"".join(rename.push(chunk, ended=chunk is chunks[-1]) for chunk in chunks)
    assert sent == b"".join(chunks).replace(b'"target"', b'"mine"', 1)
    assert rename.push(b"[]" * 4_000_000, ended=True) == b"[]" * 4_000_000
    assert time.thread_time() - began_s < 0.2


def test_a_compressed_answer_in_small_chunks_is_decoded_in_bounded_time() -> None:
    packer = zlib.compressobj()
    bomb = b"".join(packer.compress(bytes(1_000_000)) for _ in range(300)) + packer.flush()
    began_s = time.thread_time()
    assert counts(bomb, 1900, b"deflate") == (None, None)
    assert time.thread_time() - began_s < 0.2


HOSTILE = (
    b'{"usage":', b'"usage":{', b'data: {"usage":{"prompt_tokens":', b'{"message":{"usage":', b"[[[[", b'"',
    b"\\", b"{}\n", b'"usage":null,', b'{"usage":{},', b'[{"meta_info":', b'data:{"usage":{}}\n',
)  # fmt: skip


@pytest.mark.parametrize("piece", HOSTILE)
def test_the_time_to_read_an_answer_is_linear_in_its_length(piece: bytes) -> None:
    def cpu_s(answer: bytes) -> float:
        rename, began_s = ModelRename("target", "mine"), time.thread_time()
        counts(answer, 16_000)
        assert rename.push(answer, ended=True) == answer
        return time.thread_time() - began_s

    for begun in (b"", b"{", b"data: {"):
        short, long = (begun + piece * (size // len(piece)) for size in (16_000, 64_000))
        # An answer of four times the length takes four times as long; at quadratic cost it would take 16
        # times. Other work on the machine may disturb a try, so there are three.
        assert any(cpu_s(long) < max(8 * cpu_s(short), 0.01) for _ in range(3))


@pytest.mark.parametrize(
    "answer", [b"[" + b"{}," * 21_000 + b"{}]", b"\n" * 1_000_000, b"xdata:\n" * 140_000]
)
def test_an_answer_of_many_tiny_parts_is_read_in_milliseconds(answer: bytes) -> None:
    def cpu_s() -> float:
        began_s = time.thread_time()
        counts(answer, 65_536)
        StateIds().add(answer, ended=True)
        return time.thread_time() - began_s

    assert any(cpu_s() < 0.006 for _ in range(5))


def renamed(answer: bytes, size: int) -> bytes:
    rename = ModelRename("m-v2", "m")
    chunks: Iterable[bytes] = (answer[at : at + size] for at in range(0, len(answer), size))
    return b"".join([*(rename.push(chunk, ended=False) for chunk in chunks), rename.push(b"", ended=True)])


KEPT = b'{"model":"m-v2","a":{"model":"m-v2"},"message":{"model":"m-v2"}}'  # nested: not renamed
RENAMED = {  # `@` stands for the model name that changes
    "the model of the answer": b'{"id":"model",\n\n"model" : @, "x": 1}',
    "not the model of a nested object": b'{"content":[{"type":"tool_use","input":K}],"metadata":K,"model":@}',
    "not a model in text": b'{"text":"\\\\\"model\":\"m-v2\"","\"model\"":"m-v2","model":@}',
    "an event's message": b'data: {"type":"message_start","message":{"content":[K],"model":@}}\n\n',
    "an event's response": b'data: {"response":{"tools":[K],"model": @},"item":K}\n\ndata: {"a":K}\n\n',
    "a value, not a key": b'{"a":"model","b":"m-v2","c":["model","m-v2"],"model":1,"d":"m-v2"}',
    "the model of each line": b'{"model":@,"n":1}\n{"model":@}\n',
    "behind a damaged event": b': it "s\n\ndata: {"a":[\n\ndata: {"model":@}\n\n',
    "another model": b'{"model":"m-v22"}{"model":"m-v',
}  # fmt: skip


@cases("text", {name: (text,) for name, text in RENAMED.items()})
def test_only_the_model_of_an_answer_is_renamed_however_its_chunks_are_cut(text: bytes) -> None:
    answer = text.replace(b"K", KEPT)
    for size in range(1, len(answer) + 1):
        assert renamed(answer.replace(b"@", b'"m-v2"'), size) == answer.replace(b"@", b'"m"')


json_values = st.recursive(
    st.none() | st.integers() | st.text() | st.sampled_from(["model", "m-v2", "message", "\\", '"']),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["model", "message", "response", "a"]), inner)
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(st.sampled_from(["model", "message", "a"]), json_values),
    st.integers(1, 30),
    st.booleans(),
)
def test_renaming_the_text_of_an_answer_equals_renaming_its_parsed_json(
    answer: dict[str, object], size: int, wide: bool
) -> None:
    separators = (" , ", " : ") if wide else (",", ":")
    got = json.loads(renamed(json.dumps(answer, separators=separators).encode(), size))
    for inner in (answer, answer.get("message"), answer.get("response")):
        if isinstance(inner, dict) and inner.get("model") == "m-v2":
            inner["model"] = "m"
    assert got == answer


MADE = {"id": "resp_1", "object": "response", "output": [{"id": "msg_1"}]}
CREATED = {"type": "response.created", "response": MADE}
STATES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "an answer": (json.dumps(MADE, indent=1).encode(), ("resp_1",)),
    "behind long members": (json.dumps({"instructions": LONG, **MADE}).encode(), ("resp_1",)),
    "in a conversation": (json.dumps({**MADE, "conversation": {"id": "c"}}).encode(), ("resp_1", "c")),
    "a conversation by its id": (json.dumps({**MADE, "conversation": "c"}).encode(), ("resp_1", "c")),
    "an escaped id": (b' {"id": "resp_\\u00e4"}', ("resp_ä",)),
    "events": (events(CREATED, TEXT, TEXT), ("resp_1",)),
    "a long first event": (events({**CREATED, "response": {"instructions": LONG, **MADE}}), ("resp_1",)),
    "events without a blank": (b"data:%s\r\n\r\n" % json.dumps(CREATED).encode(), ("resp_1",)),
    "a last event without its end": (events(TEXT) + b"data: %s" % json.dumps(CREATED).encode(), ("resp_1",)),
    "no id among the first events": (events(*[TEXT] * 9, CREATED), ()),
    "an error": (b'{"error": {"message": "no"}}', ()),
    "an id that is no text": (b'{"id": 7}', ()),
    "no JSON": (b"x" * 5000, ()),
    "an empty answer": (b"", ()),
    "too long": (json.dumps({"instructions": LONG * 12, **MADE}).encode(), ()),
}  # fmt: skip


@pytest.mark.parametrize("size", [7, 1000, 10**7])
@cases("answer, expected", STATES)
def test_ids_of_stored_state_are_read_wherever_the_answer_is_cut_into_chunks(
    answer: bytes, expected: tuple[str, ...], size: int
) -> None:
    reader = StateIds()
    parts = [answer[at : at + size] for at in range(0, len(answer), size)]
    found = [reader.add(part, ended=False) for part in parts] + [reader.add(b"", ended=True)]
    assert [each for each in found if each] == ([expected] if expected else [])
