"""The tokens that are charged for images, audio and documents."""

import base64
import json
import math
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import cases

from picker_fleet.ingress import media
from picker_fleet.ingress.json_body import without_long_strings


def png(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", width, height) + bytes(40)


def jpeg(width: int, height: int) -> bytes:
    exif = b"\xff\xe1" + struct.pack(">H", 40_000) + bytes(39_998)
    return b"\xff\xd8" + exif + b"\xff\xc2" + struct.pack(">HBHH", 17, 8, height, width) + bytes(40)


def webp(kind: bytes, head: bytes) -> bytes:
    return b"RIFF" + bytes(4) + b"WEBP" + kind + bytes(4) + head + bytes(40)


def wav(seconds: int) -> bytes:
    head = b"RIFF" + bytes(4) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 16_000, 32_000, 2, 16)
    return head + bytes(32_000 * seconds - len(head))


MP3 = b"\xff\xfb\x90\x00" + bytes(160_000 - 4)  # 128 kbit/s
# Each case has a file and its tokens. Images are 10 x 20 squares of 28 x 28 pixels.
FILES: dict[str, tuple[bytes, float]] = {
    "PNG": (png(280, 560), 200),
    "a small PNG": (png(10, 10), 4),
    "a huge PNG": (png(2**31, 2**31), 16_384),
    "JPEG": (jpeg(280, 541), 200),
    "GIF": (b"GIF89a" + struct.pack("<HH", 253, 560) + bytes(40), 200),
    "lossy WebP": (webp(b"VP8 ", bytes(3) + b"\x9d\x01\x2a" + struct.pack("<HH", 280, 560)), 200),
    "lossless WebP": (webp(b"VP8L", b"\x2f" + struct.pack("<I", 279 | 559 << 14)), 200),
    "extended WebP": (webp(b"VP8X", bytes(4) + b"\x17\x01\0" + b"\x2f\x02\0"), 200),
    "WAV": (wav(10), 250),
    "MP3": (MP3, 250),
    "MP3 with tags": (b"ID3\x04\0\0" + bytes((0, 1, 0, 0)) + bytes(1 << 14) + MP3, 250),
    "a linearized PDF": (b"%PDF-1.7\n1 0 obj\n<</Linearized 1/L 90/H [ 5 6]/O 3/E 8/N 12/T 7>>" + MP3, 18000),
    "PDF": (b"%PDF-1.4\n" + bytes(200_000), 6000),
}  # fmt: skip


def parts(data: str) -> list[dict[str, object]]:
    """The file with base64 text `data`, as a part of a message, by the APIs of OpenAI, Anthropic, Gemini."""
    return [
        {"type": "image_url", "image_url": {"url": f"data:a/b;base64,{data}"}},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "document", "source": {"type": "base64", "media_type": "a/b", "data": data}},
        {"inlineData": {"mimeType": "a/b", "data": data}},
        {"type": "file", "file": {"file_data": f"data:a/b;base64,{data}"}},
        {"type": "input_file", "file_data": f"data:a/b;base64,{data}"},
    ]


@cases("file, tokens", FILES)
def test_the_header_of_a_media_file_gives_its_cost(file: bytes, tokens: float) -> None:
    for part in parts(base64.b64encode(file).decode()):
        message = {"role": "user", "content": [{"type": "text", "text": "p"}, part]}
        for escape in (False, True):  # some JSON writers escape slashes
            text = json.dumps({"messages": [message]})
            body = (text.replace("/", "\\/") if escape else text).encode()
            for read in (body, without_long_strings(body)):
                size_bytes, found, count = media.found(body, json.loads(read))
                assert found == pytest.approx(tokens, rel=0.01)
                assert (count, size_bytes > len(file)) == (1, True)
    form = b"name" + file + b"--"
    assert media.of_form(form, [(4, 4 + len(file))]) == (len(file), pytest.approx(tokens, rel=0.01), 0)


@cases("count, body", {
    "an image of Ollama": (1, lambda data, _: {"prompt": "?", "images": [data]}),
    "an image of SGLang": (1, lambda data, _: {"text": "?", "image_data": data}),
    "URLs of SGLang": (2, lambda data, _: {"text": "?", "image_data": [f"data:image/png;base64,{data}"] * 2}),
    "audio of SGLang": (1, lambda data, _: {"text": "?", "audio_data": data}),
    "a query": (1, lambda _, part: {"query": {"content": [part]}, "documents": ["a text", "another"]}),
    "documents": (2, lambda _, part: {"query": "?", "documents": {"content": [part, part]}}),
    "one of two texts": (1, lambda _, part: {"text_1": "?", "text_2": {"content": [part]}}),
    "inputs to embed": (1, lambda _, part: {"inputs": [{"content": [part]}]}),
})  # fmt: skip
def test_media_that_fill_a_body_count_in_every_api(
    count: int, body: Callable[[str, dict[str, object]], dict[str, object]]
) -> None:
    data = base64.b64encode(png(280, 541) + bytes(90_000)).decode()
    text = json.dumps(body(data, parts(data)[0])).encode()
    for read in (text, without_long_strings(text)):
        assert media.found(text, json.loads(read)) == (pytest.approx(len(text), rel=0.01), 200 * count, count)


def test_images_after_the_first_64_cost_the_mean_of_the_first_64() -> None:
    frame = parts(base64.b64encode(png(280, 541) + bytes(2000)).decode())[0]
    text = json.dumps({"messages": [{"content": [frame] * 100}]}).encode()
    assert media.found(text, json.loads(text))[1:] == (pytest.approx(20_000), 100)


IMAGE = {"type": "image_url", "image_url": {"url": "http://x/a.png"}}


@cases("body, count", {
    "a part of a chat": ({"messages": [{"role": "user", "content": [IMAGE]}]}, 1),
    "null members of other kinds": (
        {"messages": [{"content": [IMAGE | {"text": None, "input_audio": None, "video_url": ""}]}]}, 1,
    ),
    "only null members": ({"messages": [{"content": [{"type": "text", "text": "?", "image_url": None}]}]}, 0),
    "a reference to an answer's audio": ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, 0),
    "an odd message beside": ({"messages": [{"content": {"an": "object"}}, {"content": [IMAGE]}]}, 1),
    "texts beside": ({"messages": [{"content": ["?", IMAGE]}, {"content": 1, "images": None}]}, 1),
    "an object as content": ({"messages": [{"role": "user", "content": IMAGE}]}, 1),
    "a tool's result in a message": ({"messages": [{"role": "tool", "content": [IMAGE, IMAGE]}]}, 2),
    "a function's output": (
        {"input": [{"type": "function_call_output", "output": [{"image_url": "http://x/a.png"}]}]}, 1,
    ),
    "a screenshot": ({"input": [{"output": {"image_url": "http://x/a.png"}}, {"output": "a text"}]}, 1),
    "several of SGLang": ({"input": "?", "image_data": ["http://x/a.png", "http://x/b.png"]}, 2),
    "a thousand": ({"messages": [{"role": "user", "content": [IMAGE] * 1000}]}, 1000),
    "no images but numbers": ({"images": ["base64", *[0] * 100_000]}, 1),
})  # fmt: skip
def test_media_count_in_every_form_and_beside_unusual_members(body: dict[str, object], count: int) -> None:
    for indent in (None, 1):
        text = json.dumps(body, indent=indent).encode()
        assert media.found(text, json.loads(text))[2] == count


def test_media_among_thousands_of_objects_are_not_searched_for() -> None:
    for opening, closing in (('{"content":[', "]}"), ('{"output":', "}")):
        text = f'{{"messages":[{opening * 2000}{json.dumps(IMAGE)}{closing * 2000}]}}'.encode()
        assert media.found(text, {"messages": memoryview(text)}) == (0, 0.0, 0)


@cases("value, count, is_found", {
    "few values": ('""', 200_000, True),
    "strings": ('""', 600_000, False),
    "null": ("null", 600_000, False),
    "one long text": (json.dumps(", " * 300_000), 1, True),
})  # fmt: skip
def test_media_among_hundreds_of_thousands_of_values_are_not_searched_for(
    value: str, count: int, is_found: bool
) -> None:
    text = f'{{"input":[{json.dumps(IMAGE)},{",".join([value] * count)}]}}'.encode()
    assert (media.found(text, {"input": memoryview(text)})[2] == 1) == is_found


@given(st.sampled_from([file[:12] for file, _ in FILES.values()]), st.binary(max_size=200))
def test_any_random_media_file_has_a_valid_cost(head: bytes, rest: bytes) -> None:
    for data in (
        base64.b64encode(head + rest).decode(),
        base64.b64encode(head).decode() + "=?ü" + repr(rest),
    ):
        messages = [{"role": "user", "content": parts(data)}]
        _, found, count = media.found(json.dumps({"messages": messages}).encode(), {"messages": messages})
        assert count * 4 <= found < math.inf
        assert count == len(parts(data))
    assert 0 <= media.of_form(head + rest, [(0, len(head + rest))])[1] < math.inf
