"""Parsing of request bodies, headers and metadata, valid and malformed (docs/protocol.md; G10)."""

import base64
import contextlib
import itertools
import json
import math
import string
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import Mock

import orjson
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tables import cases

from picker_fleet.domain.allowlist import Paths, Way
from picker_fleet.domain.bands import Band
from picker_fleet.domain.config import parse
from picker_fleet.domain.errors import BadRequest, Unsupported
from picker_fleet.domain.request import InferenceRequest, PromptLine, Workload
from picker_fleet.domain.units import MOST_COST
from picker_fleet.ingress import cost, media
from picker_fleet.ingress.headers import HEADERS, read_subset, wanted_headers
from picker_fleet.ingress.intake import Ask, Intake, _name_fault, read_body
from picker_fleet.ingress.json_body import SMALL_BYTES, Body
from picker_fleet.ingress.traffic_split import Split
from picker_fleet.state.accounting_token import Keyring

SPLIT = {"name": "split", "target_models": [{"name": "split-a"}, {"name": "split-b", "weight": 3}]}
SETTINGS = parse({
    "models": [{"name": "llama", "criticality": "Critical", "weight": 2.0}, SPLIT],
    "objectives": [{"name": "premium", "criticality": "Critical", "weight": 3.0}],
    "fair_request_queue": {"queue_ttl": "30s"},
})  # fmt: skip
ANONYMOUS = Workload("", 3)
FAIRNESS, LLM_D_FAIRNESS = "x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id"
LONG = b"p" * 9000


def ask(model: str = "m") -> Ask:
    return read_body(orjson.dumps({"model": model, "prompt": "p"}))


def intake_of(settings: Any = SETTINGS, **more: Any) -> Intake:
    return Intake(settings, new_id=lambda: "made", keys=Keyring(), **more)


INTAKE = intake_of()


def asked(
    headers: dict[str, str | bytes] | None = None,
    *,
    model: str = "m",
    trusted: bool = False,
    settings: Any = SETTINGS,
) -> InferenceRequest:
    raw = {key: value.encode() if isinstance(value, str) else value for key, value in (headers or {}).items()}
    intake = INTAKE if settings is SETTINGS else intake_of(settings)
    return intake.request(ask(model), raw, subset=None, trusted=trusted)


BARE = '{"model":"m","prompt":"p"}'


def test_a_request_without_optional_headers_and_fields_has_the_defaults() -> None:
    assert asked() == InferenceRequest(
        id="made", model="m", target_model="m", stream=False, flow="m", band=Band.DEFAULT, weight=1.0,
        workload=ANONYMOUS, cost=1.0, ttl_s=30.0, subset=None, body_bytes=len(BARE), digest=asked().digest,
    )  # fmt: skip


def form(*fields: tuple[str, bytes], head: bytes = b"", end: bytes = b"--b--\r\n") -> bytes:
    """A multipart form whose boundary is `b`."""
    parts = (
        b"--b\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % (about.encode(), data)
        for about, data in fields
    )
    return head + b"".join(parts) + end


MULTIPART = b'multipart/form-data; boundary="b"'
URLENCODED = b"application/x-www-form-urlencoded"
FILE = ('name="file"; filename="a.mp3"', b"\r\n--\0\xff" * 3000)
TRANSCRIPTION = form(FILE, ('name="model"', b"whisper/\xc3\xbc"), ("name=stream", b"true"))
OCTETS = b"application/octet-stream"
# For each case: body, `Way` of the path, content type, expected model, expected stream flag.
OTHERS: dict[str, tuple[bytes, Way, bytes, str, bool]] = {
    "a multipart form": (TRANSCRIPTION, Way("inference", "form"), MULTIPART, "whisper/ü", True),
    "a form at a path for JSON": (TRANSCRIPTION, Way("inference"), MULTIPART, "whisper/ü", True),
    "a form with a preamble": (form(FILE, head=b"x\r\n"), Way("inference", "form"), MULTIPART, "", False),
    "a form and a path with a model": (form(FILE), Way("inference", "form", "w"), MULTIPART, "w", False),
    "an urlencoded form": (b"model=m%2Fx+y&stream=1", Way("inference", "form"), URLENCODED, "m/x y", True),
    "JSON for a form": (b'{"model": "m"}', Way("inference", "form"), b"application/json", "m", False),
    "JSON by curl": (b'{"model": "m"}', Way("inference"), URLENCODED, "m", False),
    "an array": (b' ["a", {"model": "b"}]', Way("inference"), b"application/json", "", False),
    "bytes": (b"\xff\0" * 9, Way("inference"), OCTETS, "", False),
    "bytes for a model of the path": (b"{\xff", Way("inference", "path", "bert"), OCTETS, "bert", False),
    "JSON for a model of the path": (b'{"model": "t"}', Way("inference", "path", "bert"), b"", "bert", False),
    "a deployment": (b'{"messages": []}', Way("inference", "body", "gpt"), b"", "gpt", False),
    "a deployment and a model": (b'{"model": "m"}', Way("inference", "body", "gpt"), b"", "m", False),
    "a path of no API": (b"\xff\0", Way("inference", is_known=False), b"text/plain", "", False),
    **{
        name: (text, Way("inference"), b"application/json", "m", True)
        for name, text in {
            "a byte order mark": b'\xef\xbb\xbf{"model": "m", "stream": true}',
            "UTF-16": '{"model": "m", "stream": true, "prompt": "ü"}'.encode("utf-16"),
            "UTF-16 without a mark": '{"model": "m", "stream": true}'.encode("utf-16-le"),
            "UTF-32": '{"model": "m", "stream": true}'.encode("utf-32-be"),
            "half an emoji": b'{"model": "m", "stream": true, "n": "\\ud83d \\\\\\ude00 \\ud83d\\ude00"}',
            "half an emoji in bytes": b'{"model": "m", "stream": true, "prompt": "\xed\xa0\xbd"}',
            "NULs after the object": b'{"model": "m", "stream": true}\n\0\0',
        }.items()
    },
    **{
        name: (text, Way("inference"), b"", "", False)
        for name, text in {
            "no model": b'{"prompt": {"id": "p"}}', "null": b'{"model": null}', "empty": b'{"model": ""}',
            "no model in a long body": b'{"prompt": "%s"}' % LONG, "nothing": b"{}",
            "null in a long body": b'{"model": null, "prompt": "%s"}' % LONG,
        }.items()
    },
}  # fmt: skip


@cases("text, way, content_type, model, stream", OTHERS)
def test_a_request_body_is_read_as_model_servers_read_it(
    text: bytes, way: Way, content_type: bytes, model: str, stream: bool
) -> None:
    read = read_body(text, way, content_type)
    assert (read.model, read.stream, read.needs_model) == (model, stream, way.is_known)


def test_renaming_the_model_in_a_form_keeps_all_other_bytes() -> None:
    renamed = read_body(TRANSCRIPTION, Way("inference", "form"), MULTIPART).renamed("tärget")
    assert renamed == TRANSCRIPTION.replace("whisper/ü".encode(), "tärget".encode())
    read = read_body(b"a=1&model=m%2Fx&b", Way("inference", "form"), URLENCODED)
    assert read.renamed("n/y") == b"a=1&model=n%2Fy&b"
    with pytest.raises(Unsupported, match="sent as model n"):
        read_body(b"[]").renamed("n")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32-le"])
def test_half_emojis_in_bytes_are_read_up_to_a_limit_and_refused_in_bounded_time_beyond(
    encoding: str,
) -> None:
    text = '{"model": "m😀", "prompt": "%s"}'
    read = read_body((text % ("\ud83d" * 200)).encode(encoding, "surrogatepass"))
    assert read.model == "m😀"
    body = (text % ("\ud83d" * 2_000_000)).encode(encoding, "surrogatepass")
    began_s = time.thread_time()
    with pytest.raises(BadRequest, match="not valid JSON"):
        read_body(body)
    assert time.thread_time() - began_s < 0.2


def test_a_body_with_more_than_64_lone_surrogates_is_refused() -> None:
    read_body(b'{"prompt": "%s", "model": "m"}' % (b"\\ud83d " * 64))
    with pytest.raises(BadRequest, match="not valid JSON"):
        read_body(b'{"prompt": "%s", "model": "m"}' % (b"\\ud83d " * 65))


def test_a_malformed_body_of_a_million_escapes_is_refused_in_milliseconds() -> None:
    def cpu_s() -> float:
        began_s = time.thread_time()
        with pytest.raises(BadRequest, match="not valid JSON"):
            read_body(body)
        return time.thread_time() - began_s

    body = b'{"model": "m", "prompt": "%s"} x' % (b"\\ud83d\\ude00" * 650_000)
    assert min(cpu_s() for _ in range(3)) < 0.06


def test_an_uploaded_audio_file_is_charged_as_speech_and_not_as_text_of_its_length() -> None:
    upload = form(('name="file"; filename="a.wav"', b"x" * 512_000), ('name="model"', b"m"))
    charge, _ = costed(read_body(upload, Way("inference", "form"), MULTIPART))
    assert 512 <= charge <= 600


FORM_FAULTS = {
    "two models": (form(('name="model"', b"a"), ('name="model"', b"b")), MULTIPART, "has model twice"),
    "two boundaries": (form(FILE), MULTIPART + b"; boundary=c", "one boundary"),
    "no boundary": (form(FILE), b"multipart/form-data", "one boundary"),
    "another boundary": (form(FILE), b"multipart/form-data; boundary=c", "no part"),
    "cut off": (form(FILE, end=b"")[:-2], MULTIPART, "cut off"),
    "no end": (form(FILE, end=b""), MULTIPART, "cut off"),
    "a name in RFC 2231's form": (form(("name*=utf-8''model", b"a")), MULTIPART, "one name"),
    "two names": (form(('name="x"; name="model"', b"a")), MULTIPART, "one name"),
    "too many fields": (form(*[("name=a", b"")] * 300), MULTIPART, "more than 256 fields"),
    "long headers": (form(*[("name=a" + ";a=b" * 1000, b"")] * 20), MULTIPART, "headers of the form"),
    "a long model": (form(('name="model"', b"m" * 300)), MULTIPART, "longer than 256"),
    "no UTF-8": (form(('name="model"', b"\xff")), MULTIPART, "not valid UTF-8"),
}  # fmt: skip


@cases("text, content_type, says", FORM_FAULTS)
def test_the_refusal_of_a_malformed_form_names_the_fault(text: bytes, content_type: bytes, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        read_body(text, Way("inference", "form"), content_type)


@given(
    st.lists(
        st.tuples(st.sampled_from(["name=model", 'name="f"; filename=x']), st.binary(max_size=30)), max_size=4
    )
)
def test_every_random_form_is_either_read_or_refused(fields: list[tuple[str, bytes]]) -> None:
    with contextlib.suppress(BadRequest):
        read = read_body(form(*fields), Way("inference", "form"), MULTIPART)
        models = [value for about, value in fields if about == "name=model" and b"\r\n--b" not in value]
        assert read.model == (models[0].decode() if models else "")


# For each case: settings, live rewrite of any model, models of the endpoints, and the three expected models.
ONE_MODEL = {"models": [{"name": "llama"}]}
UNNAMED = {
    "a default": ({"default_model": "d", **ONE_MODEL}, None, ("x",), ("d", "d", "d")),
    "a default that is rewritten": ({"default_model": "d"}, "v2", (), ("d", "v2", "d")),
    "a rewrite of any model": (ONE_MODEL, "v2", (), ("v2", "v2", "")),
    "the only configured model": (ONE_MODEL, None, ("x",), ("llama", "llama", "llama")),
    "the only model that endpoints report": ({}, None, ("x",), ("x", "x", "x")),
}


@cases("config, rewrite, served, expected", UNNAMED)
def test_a_request_without_a_model_gets_the_model_of_its_pool(
    config: Any, rewrite: str | None, served: tuple[str, ...], expected: tuple[str, str, str]
) -> None:
    intake = intake_of(parse(config), served_models=lambda: served)
    if rewrite:
        intake.use_live({}, {}, Split.of([(rewrite, 1)]))
    read = read_body(b'{"prompt": "p"}')
    request = intake.request(read, {}, subset=None, trusted=False)
    assert (request.model, request.target_model, intake.default_model) == expected


@pytest.mark.parametrize("served", [(), ("a", "b")])
def test_a_request_without_a_model_is_refused_unless_its_pool_has_one(served: tuple[str, ...]) -> None:
    intake = intake_of(parse({}), served_models=lambda: served)
    with pytest.raises(BadRequest, match="default_model"):
        intake.request(read_body(b"{}"), {}, subset=None, trusted=False)
    unknown = read_body(b"", Way("inference", is_known=False))
    assert intake.request(unknown, {}, subset=None, trusted=False).model == "unnamed"


# Error message -> name of the case -> malformed body.
BAD: dict[str, dict[str, bytes]] = {
    "body is empty": {"nothing": b""},
    "not valid JSON": {
        "NaN": b'{"model": NaN}', "no UTF-8": b'{"model": "\xff"}',
        "long, cut": b'{"model": "m", "prompt": "%s' % LONG,
        "long, a quote outside": b'{"model": \\"m", "prompt": "%s"}' % LONG,
    },
    "not valid JSON: Input data was truncated": {"cut": b'{"model": "m"', "a cut array": b"[1"},
    r"not valid JSON.* \(byte 90\d\d\)": {"long, a bracket": b'{"model": "m", "prompt": "%s"]' % LONG},
    "nested too deeply": {"deeply nested": b'{"a":' + b"[" * 100_000, "a deep array": b"[" * 100_000},
    "must be a JSON object": {"a text": b'"model"', "a number": b"7"},
    "model must be a string": {"a number": b'{"model": 5}', "an object": b'{"model": {"model":"m"}}'},
    "model is empty": {"blank": b'{"model": "   "}'},
    "model contains a control character": {
        "31": b'{"model": "a\\u001fb"}', "0": b'{"model": "a\\u0000"}', "a line": b'{"model": "a\\nb"}',
    },
    "model is longer than 256 bytes": {
        **{name[0]: orjson.dumps({"model": name}) for name in ("m" * 257, "é" * 129)},
        "in a long body": b'{"model": "%s"}' % LONG,
    },
    # JSON parsers differ in which value of a repeated key they use.
    "the body has model twice": {
        "in escapes": b'{"model": "a", "mod\\u0065l": "b"}',
        "around a long prompt": b'{"model": "a", "prompt": "%s", "model": "b"}' % LONG,
    },
    "has messages twice": {"two": b'{"model": "a", "n": [{"messages": 1}], "messages": [], "messages": []}'},
    "more than 256 keys": {"257": b'{"model": "a"' + b"".join(b', "k%d": 1' % n for n in range(256)) + b"}"},
}  # fmt: skip


@cases("says, asked", {
    f"{says}: {name}": (says, asked) for says, bodies in BAD.items() for name, asked in bodies.items()
})  # fmt: skip
def test_the_refusal_of_a_malformed_body_names_the_fault(says: str, asked: bytes) -> None:
    with pytest.raises(BadRequest, match=says):
        read_body(asked)


TOKENS = parse({
    "models": [{"name": "limited", "max_inflight_per_endpoint": 3}, {"name": "short", "max_model_len": 2000}],
    "objectives": [
        {"name": "tight", "max_inflight_per_endpoint": 2},
        {"name": "wide", "max_inflight_per_endpoint": 5},
        {"name": "any"},
    ],
    "request_queue_controller": {"unit": "tokens", "watermark_per_backend": 8000},
})  # fmt: skip


def costed(read: Ask, settings: Any = TOKENS) -> tuple[float, bool]:
    request = intake_of(settings).request(read, {}, subset=None, trusted=False)
    return request.cost, request.learn


# For each case: the member, the object around it, the value in the body, and the value read.
MAXIMA = [
    *(
        (name, within, 100, 100)
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict")
        for within in ("", "sampling_params", "parameters", "options", "generationConfig")
    ),
    *(
        ("max_tokens", within, value, answer)
        for within in ("", "options")
        for value, answer in (
            *((given, given) for given in (1, 7.0, 1e6)),
            *((given, 1_000_000) for given in (2**62, 1e300)),
            ("100", 100),  # model servers accept a quoted number
            *((given, None) for given in (0, -5, 0.5, True, "many", None, [100])),
        )
    ),
]


@pytest.mark.parametrize(("name", "within", "value", "answer"), MAXIMA)
def test_a_request_is_charged_for_its_maximum_answer_length_if_the_length_is_valid(
    name: str, within: str, value: object, answer: float | None
) -> None:
    fields = {within: {name: value}} if within else {name: value}
    for length in (400, 8000):
        others = {"model": "m", **fields}
        bare = len(orjson.dumps({**others, "prompt": ""}))
        body = orjson.dumps({**others, "prompt": "p" * (length - bare)})
        found, learns = costed(read_body(body))
        # In short bodies digits and punctuation count more than letters.
        near = pytest.approx((length - len(orjson.dumps(others))) / 4, abs=8 if length == 400 else 0)
        assert (found - (answer or 0), learns) == (near, answer is None)


# Model servers and APIs differ in which of several maximum answer lengths they apply.
@pytest.mark.parametrize("fields", [{"max_tokens": 5, "max_completion_tokens": 9}, {"max_tokens": 9}])
def test_the_largest_of_several_maximum_answer_lengths_is_charged(fields: dict[str, object]) -> None:
    body = orjson.dumps({"model": "m", **fields, "max_output_tokens": None, "prompt": "p"})
    without = costed(read_body(orjson.dumps({"model": "m", "prompt": "p", "max_tokens": 1})))[0]
    assert costed(read_body(body)) == (pytest.approx(without - 1 + 9, abs=2), False)


def chat(*content: object, **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content or "", **more}], "max_tokens": 10}


WORDS = [f'{number}, \\"[{{' for number in range(100)]
IDS = list(range(1000, 2000))
TEXT = {"role": "user", "content": "p" * 400}
PNG = {"media_type": "image/png", "data": "iVBO" * 50_000}
ANTHROPICS_IMAGE = {"type": "image", "source": {"type": "base64", **PNG}}
PLAIN_TEXT = {"type": "text", "media_type": "text/plain", "data": "p" * 4000}
# For each case: fields, expected sequences, expected tokens (None: by each byte of the body).
COSTS: dict[str, tuple[dict[str, object], float, float | None]] = {
    "a prompt": ({"prompt": "p" * 400, "max_tokens": 10}, 1, 100 + 10),
    "answers": ({"prompt": "p" * 400, "max_tokens": 10, "n": 64}, 64, 100 + 640),
    "the best of": ({"prompt": "p" * 400, "max_tokens": 10, "n": "1", "best_of": 64.0}, 64, 100 + 640),
    "nested": ({"text": "p" * 400, "sampling_params": {"max_new_tokens": 10, "n": 64}}, 64, 100 + 640),
    "nested for each": (
        {"text": ["p" * 200] * 2, "sampling_params": [{"n": 1}, {"max_new_tokens": 10, "n": 64}]}, 128, 1380),
    "prompts": ({"prompt": WORDS, "max_tokens": 10, "n": 64}, 6400, None),
    "many prompts": ({"prompt": WORDS * 100, "max_tokens": 10, "n": 64}, 640_000, None),
    "long prompts": ({"input": ["p" * 40_000] * 3, "max_tokens": 10}, 3, 30_000 + 30),
    "few ids": ({"prompt": IDS[:150], "max_tokens": 10}, 1, 150 + 10),
    "some ids": ({"prompt": IDS[:600], "max_tokens": 10}, 1, 600 + 10),
    "ids": ({"prompt": IDS, "max_tokens": 10}, 1, 1000 + 10),
    "short ids": ({"prompt": [1] * 4000, "max_tokens": 10}, 1, 4000 + 10),
    "prompts of ids": ({"prompt": [IDS, IDS, IDS], "max_tokens": 10}, 3, 3000 + 30),
    "documents": ({"query": "q", "documents": [{"text": "p" * 80}] * 5, "max_tokens": 1}, 5, None),
    "pairs": ({"text_1": "a", "text_2": ["b", "c"], "max_tokens": 1}, 2, None),
    "a chat": ({"messages": [TEXT] * 3, "max_tokens": 10}, 1, 300 + 10),
    "chats": ({"messages": [[TEXT]] * 3, "max_tokens": 10}, 3, 300 + 30),
    "items": ({"input": [TEXT] * 3, "max_output_tokens": 10}, 1, 300 + 10),
    "no maximum": ({"prompt": "p" * 400, "n": 10}, 10, 100 + 10 * 256),
    "absurd": ({"prompt": "p", "n": 1e300, "max_tokens": 1}, 1_000_000, 1_000_000),
    "more absurd": ({"prompt": "p", "n": 1e300, "max_tokens": 1e300}, 1_000_000, MOST_COST),
    "no numbers": ({"prompt": "p", "n": None, "best_of": "x", "max_tokens": 1, "options": "o"}, 1, 1),
    "an image": (chat({"image_url": {"url": "data:image/png;base64," + "iVBO" * 50_000}}), 1, 1500 + 10),
    "an image by address": (chat({"type": "image_url", "image_url": {"url": "http://a"}}), 1, 1500 + 10),
    "a tool's image": (chat({"type": "tool_result", "content": [ANTHROPICS_IMAGE]}), 1, 1500 + 10),
    "Ollama's image": (chat(images=["iVBO" * 50_000]), 1, 1500 + 10),
    "Responses' image": (
        {"input": [{"content": [{"image_url": "data:" + "iVBO" * 50_000}]}], "max_tokens": 10}, 1, 1510),
    "Gemini's image": ({"contents": [{"parts": [{"inlineData": PNG}]}], "max_tokens": 10}, 1, 1500 + 10),
    "sound": (chat({"type": "input_audio", "input_audio": {"data": "U" * 10**6}}), 1, 1500 + 1000 + 10),
    "a document that is text": (chat({"type": "document", "source": PLAIN_TEXT}), 1, 1000 + 10),
    "a tool's input": (chat({"type": "tool_use", "input": {"image": {"url": "p" * 4000}}}), 1, 1000 + 10),
}  # fmt: skip
REQUESTS = parse({"models": []})


def size_of(text: bytes) -> int:
    """The size of ASCII text: a letter or blank counts 1, a digit or punctuation mark 2, a backslash 0."""
    shown = text.replace(b"\\", b"")
    return len(shown) + len(shown.translate(None, b" " + string.ascii_letters.encode()))


@cases("fields, sequences, tokens", COSTS)
def test_the_cost_of_a_request_is_the_sequences_and_tokens_that_an_engine_runs(
    fields: dict[str, object], sequences: float, tokens: float | None
) -> None:
    for body in (orjson.dumps({"model": "m", **fields}), json.dumps({**fields, "model": "m"}).encode()):
        assert costed(read_body(body), REQUESTS) == (sequences, False)
        found, learns = costed(read_body(body))
        by_bytes = size_of(body) / 4 + sequences * (fields.get("max_tokens") or 256)  # type: ignore[operator]
        assert not learns
        assert found == pytest.approx(by_bytes if tokens is None else tokens, rel=0.02, abs=60)


@cases("member, sequences", {
    "an infinite number": (b'"n": 1e400', 1),
    "more digits than Python reads": (b'"n": ' + b"9" * 399, 1),
    "invalid UTF-8": (b'"n": "\xff"', 1),
    "a section that is an infinite number": (b'"options": 1e400', 1),
    "a section with an infinite number": (b'"options": {"temperature": 1e400, "n": 64}', 64),
    "a section with invalid UTF-8": (b'"sampling_params": [{"n": 64, "stop": "\xff"}]', 64),
    "a section with a number of too many digits": (b'"options": {"n": ' + b"9" * 5000 + b"}", 1),
})  # fmt: skip
def test_a_member_that_only_some_json_readers_accept_is_costed_by_its_readable_part(
    member: bytes, sequences: int
) -> None:
    body = b'{"model": "m", "prompt": "p", %s}' % member
    assert costed(read_body(body), REQUESTS)[0] == sequences
    costed(read_body(body))


DENSE = (b"[", b"[],", b"{},", b'"",', b"1,", b'{"image":1},', b'{"type":"image","content":[', b'"\\\\",')


@pytest.mark.parametrize(
    "name", ["prompt", "input", "messages", "documents", "n", "sampling_params", "options"]
)
def test_the_cost_of_a_deeply_nested_body_is_computed_in_bounded_time(name: str) -> None:
    for piece in DENSE:
        body = b'{"model":"m","%s":[%s1]}' % (name.encode(), piece * (1_000_000 // len(piece)))
        with contextlib.suppress(BadRequest):
            read = read_body(body)
            began_s = time.thread_time()
            costed(read)
            costed(read, REQUESTS)
            assert time.thread_time() - began_s < 0.2


@cases("fields, length, cost, learns", {
    "an answer that its model cannot give": ({"max_tokens": 1e6}, 4000, 2000, False),
    "an answer that its model can give": ({"max_tokens": 50}, 4000, 1050, False),
    "a prompt that its model does not take": ({}, 400_000, 2000, True),
})  # fmt: skip
def test_the_cost_of_a_request_is_at_most_the_max_model_len_of_its_model(
    fields: dict[str, object], length: int, cost: float, learns: bool
) -> None:
    body = orjson.dumps({"model": "short", **fields, "prompt": "p" * (length - len(',"prompt":""'))})
    assert costed(read_body(body)) == (cost, learns)


@pytest.mark.parametrize(
    ("objective", "limits"), [("", (3, 0)), ("tight", (2, 2)), ("wide", (3, 5)), ("any", (3, 0))]
)
def test_the_lower_flow_limit_of_model_and_objective_applies(objective: str, limits: tuple[int, int]) -> None:
    headers = {FAIRNESS: "a", **({"x-gateway-inference-objective": objective} if objective else {})}
    found = [asked(headers, model=model, settings=TOKENS) for model in ("limited", "m")]
    assert [(request.flow, request.limit) for request in found] == [("a", limit) for limit in limits]


def test_renaming_the_model_in_a_json_body_keeps_all_other_bytes() -> None:
    for text, renamed in (
        ("{}", '{"model":"t"}'),
        (' { "a": {"model": 1} }', ' {"model":"t", "a": {"model": 1} }'),
        ('{"a": 1, "model" : null}', '{"a": 1, "model" : "t"}'),
    ):
        assert read_body(text.encode()).renamed("t") == renamed.encode()
    for before, after in (
        ('{"prompt": "\\ud83d \\ud83d\\ude00 \\ude00", "model": ', ', "n": 1}'),
        ('{"a": {"model": "m"}, "x":1e400 ,\n "model" :\t', ', "prompt": "üñí \\u00fc", "f": 0.10}'),
        ('{"\\"model\\"": "m", "mod\\u0065l":', "}"),
        ("{" + '"deep":' + "[" * 300 + "]" * 300 + ', "model":', ' , "n":1, "n":2} '),
    ):
        body = f'{before}"m"{after}'.encode()
        assert read_body(body).renamed("tärget") == f'{before}"tärget"{after}'.encode()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
keys = st.sampled_from(["model", "stream", "n", "a", "ü", '"', "\\", "messages"]) | st.text(max_size=5)
spaces = st.text(st.sampled_from(" \t\n\r"), max_size=2)


@given(st.lists(st.tuples(keys, st.booleans()), max_size=6), st.data())
def test_a_body_is_read_as_by_json_loads_or_refused_for_a_repeated_key(
    written: list[tuple[str, bool]], data: st.DataObject
) -> None:
    # Keys of the JSON are plain or wholly escaped; values and the whitespace between tokens are random.
    members = []
    for key, escaped in written:
        plain = "".join(f"\\u{ord(char):04x}" if ord(char) < 0x10000 else char for char in key)
        name = f'"{plain}"' if escaped else json.dumps(key, ensure_ascii=data.draw(st.booleans()))
        value = data.draw(st.text(max_size=6).map(json.dumps) | json_values.map(json.dumps))
        members.append("".join((data.draw(spaces), name, data.draw(spaces), ":", data.draw(spaces), value)))
    text = "{" + ",".join(members) + data.draw(spaces) + "}"
    if "NaN" in text or "Infinity" in text:
        return  # Python's json writes NaN and Infinity, which JSON lacks
    names = [name for name, _ in json.loads(text, object_pairs_hook=list)]
    used = {"model", "stream", "messages"}
    # A small and a large body are parsed differently; a large body that is not ASCII is copied.
    bodies = (Body(text.encode()), Body(text.encode(), large_bytes=1))
    twice = {name for name in used if names.count(name) > 1}
    if twice:
        for body in bodies:
            with pytest.raises(BadRequest, match=f"has ({'|'.join(twice)}) twice"):
                assert body.values
        with pytest.raises(BadRequest):
            read_body(text.encode())
        return
    whole = json.loads(text)
    if isinstance(whole.get("model"), str) and not _name_fault(whole["model"]):
        read = read_body(text.encode())
        assert (read.model, read.stream) == (whole["model"], whole.get("stream") is True)
    for body in bodies:
        for name in used & whole.keys():
            assert json.loads(bytes(body.values[name])) == whole[name]
        if "model" in whole:
            assert json.loads(body.with_model(b'"t"')) == {**whole, "model": "t"}


# Pairs of a given workload_id or criticality and the value read; None: no workload is registered.
IDS: list[tuple[object, str | None]] = [
    ("batch", "batch"), ("  batch  ", "batch"), ("b/ü:1", "b/ü:1"), ("x" * 128, "x" * 128),
    *((no_id, None) for no_id in ("", "   ", 7, {"a": {"b": []}})),
]  # fmt: skip
CRITICALITIES = [
    *((1, 1), (4, 4), (5, 5), (0, 1), (-3, 1), (6, 5), (9e99, 5), (123456789012345678901234567890, 5)),
    *((4.9, 4), ("5", 3), (True, 3), (None, 3), ([5], 3)),
]
NO_CONTEXTS = [
    *(json.dumps({"workload_id": bad}) for bad in ("a\0b", "a\x1fb", "x" * 129, "ü" * 65, "x" * 1_000_000)),
    *('["workload_id"]', "5", '{"workload_id": "b", "criticality": NaN}', "[" * 50_000, "{", ""),
    *('{"workload_id": "a\x85b"}', '{"workload_id": "b", "criticality": 1e999}', '{"workload_id": "a\x00b"}'),
]


WORKLOADS = [
    *(
        (json.dumps({"workload_id": given, "criticality": 4}), Workload(taken or "", 4))
        for given, taken in IDS
    ),
    *(
        (json.dumps({"workload_id": "batch", "criticality": given}), Workload("batch", taken))
        for given, taken in CRITICALITIES
    ),
    ('{"workload_id": "b"}', Workload("b", 3)),
    ('{"criticality": 2}', Workload("", 2)),
    *((text, ANONYMOUS) for text in NO_CONTEXTS),
]


@pytest.mark.parametrize(("header", "expected"), WORKLOADS, ids=lambda value: str(value)[:40])
def test_a_malformed_workload_header_is_never_an_error(header: str, expected: Workload) -> None:
    assert asked({"x-workload-context": header}).workload == expected


pieces = st.sampled_from(["plain text, ", 'said "so" ', "back\\slash", '\\"', "\\\\", "ü", "\n", "{[,:"])


@given(
    st.lists(st.tuples(pieces, st.integers(1, 3000)), max_size=4), st.permutations(range(5)), st.booleans()
)
def test_fields_before_and_after_long_strings_of_a_body_are_read(
    written: list[tuple[str, int]], order: list[int], escaped: bool
) -> None:
    prompt = "".join(piece * count for piece, count in written)
    members = {"model": "m", "prompt": prompt, "n": [{"a": prompt}, 1], "max_tokens": 7, "stream": True}
    whole = {name: members[name] for name in (list(members)[place] for place in order)}
    body = json.dumps(whole, ensure_ascii=escaped).encode()
    read = read_body(body)
    assert (read.model, read.stream, read.body_bytes) == ("m", True, len(body))
    free = PromptLine(0, 0)
    found = cost.tokens(
        read.text, read.body_bytes, read.members, count=1, most=math.inf, default=0, line=free
    )
    assert found[:3] == (1, 7, False)
    assert read.body is not None
    assert json.loads(bytes(read.body.values["prompt"])) == prompt
    assert json.loads(read.renamed("other")) == {**whole, "model": "other"}


@given(st.text() | json_values.map(str))
def test_any_text_as_workload_header_gives_a_valid_workload(text: str) -> None:
    workload = asked({"x-workload-context": text.encode("utf-8", "ignore")}).workload
    assert 1 <= workload.criticality <= 5
    assert len(workload.id.encode()) <= 128


PROMPT_MEMBERS = ("tools", "functions", "instructions", "messages", "prompt", "input", "cache_salt", "other")


@given(st.dictionaries(st.sampled_from(PROMPT_MEMBERS), st.text() | st.lists(st.text()) | st.just("p" * 600)))
def test_prompt_hashes_of_a_small_body_are_the_same_on_both_parsing_paths(members: dict[str, Any]) -> None:
    text = json.dumps({"model": "m", **members}, ensure_ascii=False).encode()
    simple = read_body(text)
    assume(isinstance(simple.read, bytes))
    intake = intake_of(prefixes=Mock(needs_prefix_hashes=True))
    small, whole = (
        intake.request(each, {}, subset=None, trusted=True).prefix
        for each in (simple, simple._replace(read=Body(text)))
    )
    assert small == whole


def test_a_lone_surrogate_at_the_end_of_a_long_prompt_keeps_its_prefix_hashes() -> None:
    intake = intake_of(prefixes=Mock(needs_prefix_hashes=True))
    same = b"a" * 100_000
    half, whole, malformed = (
        intake.request(read_body(text % same), {}, subset=None, trusted=True).prefix
        for text in (
            b'{"model": "m", "prompt": "%s\\ud83d"}',
            b'{"model": "m", "prompt": "%s"}',
            b'{"model": "m", "prompt": "%s\\q"}',
        )
    )
    assert len(half) > 1
    assert half[:-1] == whole[: len(half) - 1]
    assert malformed == ()


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_every_random_body_is_either_read_or_refused(body: bytes) -> None:
    with contextlib.suppress(BadRequest):
        read = read_body(body)
        assert read.body.values.get("model") is None or json.loads(read.renamed("t"))["model"] == "t"


@pytest.mark.parametrize("name", [FAIRNESS, LLM_D_FAIRNESS])
def test_the_fairness_id_in_a_header_names_the_flow(name: str) -> None:
    assert asked({name: "tenant a"}).flow == "tenant a"
    settings = parse({"fair_request_queue": {"flow_key": "model"}})
    assert asked({name: "tenant a"}, settings=settings).flow == "m"
    # The x-gateway- header takes precedence over the x-llm-d- header.
    assert asked({FAIRNESS: "a", LLM_D_FAIRNESS: "b"}).flow == "a"
    assert asked({FAIRNESS: "", LLM_D_FAIRNESS: "b"}).flow == "b"


CONTROL, NO_UTF8 = "contains a control character", "is not valid UTF-8"
BAD_HEADERS: dict[str, dict[str | bytes, str]] = {
    FAIRNESS: {"a\x1fb": CONTROL, "a\nb": CONTROL},
    LLM_D_FAIRNESS: {"a" * 257: "is longer than 256 bytes", b"caf\xe9": NO_UTF8},
    "x-gateway-inference-objective": {"a\x1fb": CONTROL, b"\xff": NO_UTF8},
    "x-gateway-model-name-rewrite": {"a\x00": CONTROL},
    "x-llm-d-model-name-rewrite": {"a" * 300: "is longer than 256 bytes"},
    "x-workload-context": {b'{"workload_id": "\xff"}': NO_UTF8},
    "x-llm-d-inference-ttl": {
        **{text: f"'{text}' is no duration" for text in ("soon", "-1", "nan", "1e3")},
        "0": "must be above zero", b"\xb2": NO_UTF8,
    },
    "x-request-timeout": {"soon": "'soon' is no duration", "0": "must be above zero", b"\xb2": NO_UTF8},
    **{name: dict.fromkeys(("soon", "0", "-1", "1e3", "500ms", "9" * 10), "above 0 and below 10^9")
       for name in ("x-slo-ttft-ms", "x-slo-tpot-ms")},
    "grpc-timeout": {text: f"'{text}' is no gRPC timeout" for text in ("30", "123456789S", "-1S")},
    "x-envoy-expected-rq-timeout-ms": {f"{n}": f"'{n}' is no number of milliseconds" for n in (1.5, -1)},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in BAD_HEADERS for value in BAD_HEADERS[name]]
)
def test_the_refusal_of_a_malformed_header_names_header_and_fault(name: str, value: str | bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        asked({name: value})
    assert f"header {name}" in str(caught.value)
    assert BAD_HEADERS[name][value] in str(caught.value)


def test_a_header_replaces_the_configured_latency_objective() -> None:
    settings = parse(
        {
            "models": [{"name": "llama", "slo_ttft": "2s"}],
            "objectives": [{"name": "premium", "slo_ttft": "500ms", "slo_tpot": "50ms"}],
        }
    )
    named = {"x-gateway-inference-objective": "premium"}
    found = [
        asked(headers, model="llama", settings=settings).latency
        for headers in ({}, named, {**named, "x-slo-ttft-ms": "3000"}, {"x-slo-tpot-ms": "12.5"})
    ]

    assert found == [(2.0, math.inf), (0.5, 0.05), (3.0, 0.05), (2.0, 0.0125)]
    assert settings.promised_latency("other") == (0.5, 0.05)


TTL, TIMEOUT, GRPC_TIMEOUT = "x-llm-d-inference-ttl", "x-request-timeout", "grpc-timeout"
ENVOYS_TIMEOUT = "x-envoy-expected-rq-timeout-ms"
OWN_S: dict[str, dict[str, float]] = {
    TIMEOUT: {"5": 5.0, "500ms": 0.5},
    GRPC_TIMEOUT: {"7S": 7.0, "250m": 0.25, "5000u": 0.005, "99999999n": 0.099999999, "0n": 0.001},
    ENVOYS_TIMEOUT: {"1500": 1.5},
}
NOT_OWN_S: dict[str, dict[str, float]] = {
    TTL: {"5": 5, "0.5": 0.5, "500ms": 0.5, " 5s ": 5, "2m": 30, "9999999": 30, "0.1ms": 0.001},
    TIMEOUT: {"31": 30.0},
    GRPC_TIMEOUT: {"1M": 30.0, "1H": 30.0},
    ENVOYS_TIMEOUT: {"0": 30.0},
}


@cases("headers, expected_s, by_client", {
    **{
        f"{name} {text!r}": ({name: text}, expected_s, own)
        for own, table in ((True, OWN_S), (False, NOT_OWN_S))
        for name, texts in table.items()
        for text, expected_s in texts.items()
    },
    "a client's least deadline": ({TIMEOUT: "9", GRPC_TIMEOUT: "8S", ENVOYS_TIMEOUT: "7000"}, 7.0, True),
    "a TTL below a client's deadline": ({TIMEOUT: "9", TTL: "4"}, 4.0, False),
    "a client's deadline below a TTL": ({TIMEOUT: "3", TTL: "4"}, 3.0, True),
})  # fmt: skip
def test_a_deadline_header_shortens_the_ttl_of_a_request(
    headers: dict[str, str | bytes], expected_s: float, by_client: bool
) -> None:
    request = asked(headers)
    assert (request.ttl_s, request.by_client) == (pytest.approx(expected_s), by_client)


@cases("model, objective, band, weight", {
    "neither": ("m", None, Band.DEFAULT, 1.0),
    "the model": ("llama", None, Band.CRITICAL, 2.0),
    "the objective": ("m", "premium", Band.CRITICAL, 3.0),
    "an unknown objective": ("llama", "unknown", Band.DEFAULT, 1.0),
})  # fmt: skip
@pytest.mark.parametrize("name", ["x-gateway-inference-objective", "x-llm-d-inference-objective"])
def test_the_objective_or_else_the_model_decides_band_and_weight(
    name: str, model: str, objective: str | None, band: Band, weight: float
) -> None:
    request = asked({name: objective} if objective else {}, model=model)
    assert (request.band, request.weight) == (band, weight)


def variants(
    count: int,
    of: Callable[[int], str] = lambda number: "p",
    request_id: Callable[[int], str] = lambda number: "the-same",
    *,
    key: bytes = b"key",
    trusted: bool = False,
    headers: Mapping[str, bytes] = {},
) -> list[str]:
    """Target models that a new replica chooses for the requests 0, 1, … to a model with a traffic split."""
    settings = parse({"models": [SPLIT], "extproc": {"trusted_headers": [LLM_D_FAIRNESS]}})
    made = (f"made-{number}" for number in itertools.count())
    intake = Intake(settings, new_id=made.__next__, keys=Mock(variant_key=key))
    sent_as: list[str] = []
    for number in range(count):
        body = read_body(orjson.dumps({"model": "split", "prompt": of(number)}))
        fields = {"x-request-id": request_id(number).encode(), **headers}
        request = intake.request(body, fields, subset=None, trusted=trusted)
        assert headers or (request.model, request.flow) == ("split", "split")
        sent_as.append(request.target_model)
    return sent_as


def test_the_model_variant_depends_only_on_a_request_id_that_the_gateway_sets() -> None:
    ids = {"request_id": lambda number: f"id-{number}", "trusted": True}
    found = variants(200, **ids)
    assert {*found} == {"split-a", "split-b"}  # test_traffic_split.py checks the shares
    # A retry with an edited body gets the same variant at another replica.
    assert variants(200, lambda number: f"prompt {number}", **ids) == found
    assert variants(200, key=b"other", **ids) != found
    assert len(set(variants(100, str, trusted=True))) == 1


@pytest.mark.parametrize(("trusted", "request_id"), [(False, "id-{}"), (True, "no id {}"), (True, "")])
def test_without_a_gateway_id_the_variant_depends_on_flow_and_body(trusted: bool, request_id: str) -> None:
    ids = {"request_id": request_id.format, "trusted": trusted}
    found = variants(200, str, **ids)
    assert {*found} == {"split-a", "split-b"}
    assert variants(200, str, **ids) == found
    assert variants(200, str, **ids, key=b"other") != found
    assert variants(200, str, **ids, headers={LLM_D_FAIRNESS: b"tenant"}) != found
    # A client's request id does not change the variant; long bodies of equal size may differ in variant.
    assert len(set(variants(100, lambda number: "p" * 10_000, **ids))) == 1
    assert len(set(variants(100, lambda number: f"{number}" + "p" * 10_000, **ids))) == 2


def test_prefix_hashes_are_computed_for_the_target_model() -> None:
    intake = intake_of(prefixes=Mock(needs_prefix_hashes=True))

    def asking(model: str) -> InferenceRequest:
        return intake.request(Ask(model, False, b'{"prompt": "%s"}' % LONG), {}, subset=None, trusted=False)

    sent = asking("split")
    plain = asking(sent.target_model)
    assert (plain.model, plain.target_model) == (sent.target_model, sent.target_model)
    assert sent.prefix
    assert sent.prefix == plain.prefix


def test_a_rewritten_request_gets_all_settings_of_the_new_model() -> None:
    limits = {"criticality": "Sheddable", "weight": 2.0, "max_inflight_per_endpoint": 3}
    big = {"name": "big", **limits, "endpoint_labels": {"gpu": "h100"}, "target_models": [{"name": "big-v2"}]}
    settings = parse({"models": [{"name": "split", "target_models": [{"name": "split-a"}]}, big]})
    rewritten = asked({"x-gateway-model-name-rewrite": "big"}, model="split", settings=settings)
    assert rewritten == asked(model="big", settings=settings)._replace(
        body_bytes=rewritten.body_bytes, digest=rewritten.digest
    )
    assert (rewritten.flow, rewritten.target_model, rewritten.limit) == ("big", "big-v2", 3)
    assert rewritten.selector == {"gpu": "h100"}


def test_headers_that_choose_a_flow_or_a_band_or_a_model_are_read_only_if_trusted() -> None:
    assert not any("fairness" in name or "objective" in name or "rewrite" in name for name in HEADERS)
    assert wanted_headers(SETTINGS) == HEADERS
    named = parse({"extproc": {"trusted_headers": [LLM_D_FAIRNESS]}})
    assert wanted_headers(named) == HEADERS | {FAIRNESS, LLM_D_FAIRNESS}


@pytest.mark.parametrize("sent", ["3b5f6ed4-8b41", "A.b_c:d-1"])
def test_a_request_id_is_used_only_if_envoy_sets_the_id(sent: str) -> None:
    assert [asked({"x-request-id": sent}, trusted=trusted).id for trusted in (True, False)] == [sent, "made"]


@pytest.mark.parametrize("sent", ["has space", "a\x1f", "ends\n", b"\xff", "x" * 129, ""])
def test_a_malformed_request_id_is_replaced(sent: str | bytes) -> None:
    assert asked({"x-request-id": sent}, trusted=True).id == "made"


@cases("hint, expected", {
    "a list": (["10.0.0.1:80", "[fd00::0001]:80"], ("10.0.0.1:80", "[fd00::1]:80")),
    "a text": ("10.0.0.1:80, 10.0.0.2:80", ("10.0.0.1:80", "10.0.0.2:80")),
    **{f"no {each!r}": (each, ()) for each in ([], "", ["localhost:80", 5.0, None, "10.0.0.1"], None, 7.0)},
})  # fmt: skip
def test_a_subset_hint_lists_endpoints(hint: object, expected: tuple[str, ...]) -> None:
    assert read_subset(hint) == expected


@pytest.mark.parametrize("entries", [["10.0.0.1:80"], [""]])
def test_only_the_first_4096_entries_of_a_subset_hint_are_read(entries: list[str]) -> None:
    found = ("10.0.0.1:80",) * 4096 if entries[0] else ()
    for hint in (entries * 200_000, ",".join(entries * 200_000)):
        began_s = time.thread_time()
        assert read_subset(hint) == found
        assert time.thread_time() - began_s < 0.1


STATE = Way("inference", has_state=True)
REFERRING: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a response": ({"previous_response_id": "resp_1"}, ("resp_1",)),
    "a conversation": ({"conversation": "conv_1"}, ("conv_1",)),
    "an object with its id": ({"conversation": {"id": "conv_1", "x": 1}}, ("conv_1",)),
    "byte for byte": ({"previous_response_id": 'é"\\ '}, ('é"\\ ',)),
    "null ids": ({"previous_response_id": None, "conversation": None}, ()),
    "no ids": ({"previous_response_id": 7, "conversation": ["c"]}, ()),
    "too long": ({"previous_response_id": "x" * 600, "conversation": {"id": "y" * 9000}}, ()),
}


@pytest.mark.parametrize("prompt", ["p", "p" * 9000, "\u1234\\u0041" * 900], ids=["small", "long", "escaped"])
@cases("members, expected", REFERRING)
def test_a_request_of_the_responses_api_names_the_state_that_it_continues(
    members: dict[str, Any], expected: tuple[str, ...], prompt: str
) -> None:
    text = json.dumps({"model": "m", "input": prompt, **members}).encode()
    assert read_body(text, STATE).refers == expected
    assert read_body(text).refers == ()


KEYED = ["session-id", "prompt_cache_key", "metadata.user_id", "user"]
SESSIONS: dict[str, tuple[dict[str, str | bytes], dict[str, Any], str]] = {
    "a header": ({"session-id": "s 1"}, {"user": "u"}, "=s 1"),
    "not configured": ({"x-session-affinity": "s"}, {}, ""),
    "the first of two keys": ({}, {"user": "u", "prompt_cache_key": "k"}, "=k"),
    "a nested key": ({}, {"metadata": {"user_id": "é"}, "user": "u"}, "=é"),
    "no text": ({}, {"metadata": [1], "user": 7, "prompt_cache_key": None}, ""),
    "too long": ({"session-id": "s" * 513}, {"user": "u" * 9000}, ""),
    "a session token precedes keys": ({"x-session-token": "a" * 28, "session-id": "s"}, {}, "a" * 28),
}


@pytest.mark.parametrize("prompt", ["p", "p" * 9000, "\u1234\\u0041" * 900], ids=["small", "long", "escaped"])
@cases("headers, members, session", SESSIONS)
def test_a_configured_header_or_body_field_names_the_session(
    headers: dict[str, str | bytes], members: dict[str, Any], session: str, prompt: str
) -> None:
    scheduling = {"scorers": {"session-affinity": 1}, "session_keys": KEYED}
    settings = parse({"scheduling": scheduling})
    assert {"session-id"} == wanted_headers(settings) - wanted_headers(parse({}))
    raw = {name: value.encode() if isinstance(value, str) else value for name, value in headers.items()}
    read = read_body(json.dumps({"model": "m", "prompt": prompt, **members}).encode())
    intake = intake_of(settings)
    assert intake.request(read, raw, subset=None, trusted=False).session == session
    if headers:
        assert intake.session_of(raw) == session
    raw.pop("x-session-token", None)
    assert intake_of(parse({})).request(read, raw, subset=None, trusted=False).session == ""


@pytest.mark.parametrize("unit", ["requests", "tokens"])
@pytest.mark.parametrize("size", [1, SMALL_BYTES])
def test_the_path_says_if_a_request_can_be_split_and_is_charged_for_an_answer(size: int, unit: str) -> None:
    text = json.dumps({"model": "m", "prompt": "x" * size, "input": ["x"] * 3}).encode()
    splits = ("v1/chat/completions", "p/v1/completions", "v1/responses")
    silent = (
        "v1/embeddings", "api/embed", "v1/messages/count_tokens", "v1/models/m:embedContent", "v1/rerank",
        "openai/deployments/m/embeddings",
    )  # fmt: skip
    intake = intake_of(parse({"tenants": {}, "request_queue_controller": {"unit": unit}}))
    for path in (*splits, *silent, "v1/messages", "v1/responses/compact", "v1/models/m:generateContent"):
        way = Paths().way("POST", f"/{path}")
        assert way is not None
        request = intake.request(read_body(text, way), {}, subset=None, trusted=True)
        expected = path in splits, 0 if path in silent else 3 * 256, False
        assert (request.can_split, request.answer_tokens, request.learn) == expected, path
        assert request.cost == (3 if unit == "requests" else request.prompt_tokens + request.answer_tokens)


@pytest.mark.parametrize("unit", ["requests", "tokens"])
def test_latencies_are_predicted_from_the_tokens_of_media_and_not_from_their_base64(unit: str) -> None:
    intake = intake_of(
        parse({"request_queue_controller": {"unit": unit}}),
        prefixes=Mock(needs_prefix_hashes=False, has_encoders=False, predicts=True),
    )
    picture = b"GIF89a" + struct.pack("<HH", 280, 560) + bytes(90_000)  # 200 tokens
    url = f"data:image/gif;base64,{base64.b64encode(picture).decode()}"
    text = {"type": "text", "text": "What is this? " * 100}
    content = [text, {"type": "image_url", "image_url": {"url": url}}]
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": content}]})
    request = intake.request(read_body(body), {}, subset=None, trusted=False)
    assert (request.body_bytes, request.prompt_bytes) == (len(body), pytest.approx(2250, rel=0.05))
    plain = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": [text] * 10}]})
    assert intake.request(read_body(plain), {}, subset=None, trusted=False).prompt_bytes == 0


@pytest.mark.parametrize("unit", ["requests", "tokens"])
@pytest.mark.parametrize("has_encoders", [False, True])
def test_a_body_is_searched_for_media_at_most_once(
    monkeypatch: pytest.MonkeyPatch, unit: str, has_encoders: bool
) -> None:
    found = Mock(side_effect=media.found)
    monkeypatch.setattr(media, "found", found)
    part = {"type": "image_url", "image_url": {"url": "http://x/a.png"}}
    body = {"model": "m", "messages": [{"role": "user", "content": [part, part]}]}
    intake = intake_of(
        parse({"request_queue_controller": {"unit": unit}}),
        prefixes=Mock(needs_prefix_hashes=False, has_encoders=has_encoders),
    )
    asked = read_body(orjson.dumps(body), Way("inference", can_split=True))
    request = intake.request(asked, {}, subset=None, trusted=False)
    assert request.media == (2 if has_encoders else 0)
    assert found.call_count == (unit == "tokens" or has_encoders)
