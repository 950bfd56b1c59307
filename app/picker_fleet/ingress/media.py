"""Estimates the tokens that engines make of the images, audio, video and documents in a body. Pure.

cost.py calls this module. Engines differ; here each kind of media has one rule, and `settle` corrects costs:

- An image costs a token for each 28 × 28 pixels, as in Qwen2-VL (arXiv 2409.12191), from 4 to 16 384.
- Audio costs 25 tokens a second, as in Qwen2-Audio (arXiv 2407.10759), at least 4.
- A page of a PDF costs 1500 tokens; 50 KB count as a page if the file does not say.

The header of a PNG, JPEG, WebP, GIF, WAV or MP3 file gives the pixels or seconds. Any other image costs 1500
tokens; any other file costs a token for each 1000 bytes, and outside forms 1500 more. Bodies are untrusted:
at most `_MOST_HEADERS` file headers of a body are read, in small pieces; further files cost the mean.
"""

import binascii
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypedDict

import msgspec
import orjson

from picker_fleet.domain.errors import MALFORMED
from picker_fleet.scheduling.forecasts import BYTES_A_TOKEN

_CHATS = ("messages", "input", "contents", "images", "image_data")  # members that are searched for media
# Members of other APIs that may have media: they are searched only if media may fill the body.
_OTHERS = frozenset((
    *("images", "image_data", "audio_data", "video_data"),  # Ollama, SGLang
    *("documents", "queries", "query", "text_1", "text_2", "inputs"),  # rerank, score, embed
))  # fmt: skip
MEMBERS: Final = frozenset((*_CHATS, *_OTHERS))

_PIXELS = 28  # an image costs a token for each square with sides of this many pixels
_LEAST_TOKENS, _MOST_IMAGE_TOKENS = 4, 16_384
_AUDIO_TOKENS_A_S = 25
_PAGE_TOKENS, _PAGE_BYTES, _MOST_PAGES = 1500, 50_000, 1000
_UNKNOWN_TOKENS, _UNKNOWN_BYTES_A_TOKEN = 1500, 1000

# A body with more JSON objects or commas is not searched for media: three million short strings take 0.1 s.
_MOST_OBJECTS, _MOST_COMMAS = 10_000, 500_000
_MOST_HEADERS = 64
_MARKS = (b"image", b"audio", b"video", b"base64", b'ata"')  # 'ata"' ends inlineData, inline_data, file_data
SHORT_BYTES: Final = 4096  # a shorter body is searched as a whole
_PICTURES = frozenset(("image", "image_url", "image_embeds", "images", "image_data"))
_NOTHING = (b"null", b'""', b"{}")  # values that some clients write for a member without media
_REFERENCE = re.compile(rb'\{\s*+"id"\s*+:\s*+"[^"]*+"\s*+\}')  # refers to the audio of an answer (OpenAI)
_ENDS_BYTES = 256  # search this many bytes at each end of a file's JSON text for its media type or start

# Matches the start of a file in base64: PNG, JPEG, GIF, RIFF (WebP, WAV), MP3 with and without tags, PDF.
_BASE64 = re.compile(rb'[",](?=iVBORw0KGg|\\?/9j\\?/|R0lGOD|UklGR|SUQz|\\?/\\?/[I-Po-v]|JVBERi)')
_ENCODED = re.compile(rb"[A-Za-z0-9+/\\]{64}")  # a word of 64 letters is base64
_ESCAPED_BYTES = 65_536  # maximum bytes to read of base64 text with escaped slashes
_HEAD_BYTES = 48
_MOST_SEGMENTS = 32  # maximum segments of a JPEG to skip before the segment with the image's size
_SIZE_SEGMENTS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # JPEG's SOF markers (ITU-T T.81, B.1)
_LINEARIZED = re.compile(rb"/Linearized[^>]{0,256}/N (\d{1,4})\b")  # a PDF's page count (ISO 32000-1, F.2)
# The bit rate, in kbit/s, of an MP3 frame, by the index in its header (ISO 11172-3 and 13818-3).
_MPEG_1 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0)
_MPEG_2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0)


def only(names: Iterable[str]) -> Any:
    """A type for msgspec, which returns the members `names` of an object as JSON texts and skips the rest."""
    typed_dict: Any = TypedDict
    return typed_dict("Members", dict.fromkeys(names, msgspec.Raw), total=False)


class Found(NamedTuple):
    """The bytes that media take in a body, their cost in tokens, and how many encode endpoints may encode."""

    size_bytes: int = 0
    tokens: float = 0.0
    number: int = 0

    def prompt_bytes(self, body_bytes: int) -> int:
        """The length of a text with as many tokens as a body of `body_bytes` with these media; 0 without."""
        if not self.size_bytes:
            return 0
        return max(body_bytes - self.size_bytes, 0) + round(self.tokens * BYTES_A_TOKEN)


NONE: Final = Found()


def found(body: bytes, members: Mapping[str, Any]) -> Found:
    """The media in a body; none if the picker cannot find them."""
    if not _may_have_media(body, members):
        return NONE
    try:
        _collect(_prompted.decode(body), media := _Media())
    except MALFORMED:
        return NONE
    return Found(media.size_bytes, media.tokens, media.count)


def may_fill(body: bytes) -> bool:
    """Whether a 16th of the body may be media. Takes 5 µs; `found` takes 3 ns for each byte of most texts."""
    return len(body) > SHORT_BYTES and any(
        _ENCODED.match(body, at) for at in range(0, len(body), len(body) // 16 + 1)
    )


def of_form(body: bytes, files: Sequence[tuple[int, int]]) -> Found:
    """Count a form's files and their tokens; `files` has each file's start and end in `body`."""
    size_bytes, tokens = 0, 0.0
    for number, (start, end) in enumerate(files):
        size_bytes += end - start

        def read(at: int, count: int, start: int = start, end: int = end) -> bytes:
            return body[start + at : min(start + at + count, end)]

        known = _File(read, end - start).tokens() if number < _MOST_HEADERS else 0.0
        tokens += known or (end - start) / _UNKNOWN_BYTES_A_TOKEN
    return Found(size_bytes, tokens)


class _Media:
    """The number of media files found so far in a body, their length as JSON text, and their cost."""

    def __init__(self) -> None:
        self.count, self.size_bytes, self.tokens = 0, 0, 0.0

    def add(self, text: bytes, *, is_image: bool) -> None:
        if text in _NOTHING or _REFERENCE.fullmatch(text):
            return
        self.count += 1
        self.size_bytes += len(text)
        if self.count > _MOST_HEADERS:
            mean = self.tokens / (self.count - 1)
            self.tokens += max(mean, len(text) / _UNKNOWN_BYTES_A_TOKEN)
        elif known := _of_base64(text):
            # The header of an audio file may claim any bit rate, so bound the tokens from below.
            self.tokens += max(known, _LEAST_TOKENS)
        else:
            self.tokens += _UNKNOWN_TOKENS + (0 if is_image else len(text) / _UNKNOWN_BYTES_A_TOKEN)


def _may_have_media(body: bytes, members: Mapping[str, Any]) -> bool:
    """Whether the body may contain media. A short body is searched as a whole, a long body by `members`."""
    if not _OTHERS.isdisjoint(members) and may_fill(body):
        return body.count(b"{") <= _MOST_OBJECTS
    for name in _CHATS:
        if name in members and not _is_plain(value := members[name]):
            if len(body) <= SHORT_BYTES:
                text = body
            else:
                text = bytes(value) if isinstance(value, msgspec.Raw | memoryview) else orjson.dumps(value)
            if any(mark in text for mark in _MARKS):
                is_short = len(body) < 2 * _MOST_COMMAS  # a short body cannot have many values
                return body.count(b"{") <= _MOST_OBJECTS and (is_short or body.count(b",") <= _MOST_COMMAS)
    return False


def _is_plain(value: object) -> bool:
    """Whether a decoded member is a text, or a list of messages that each have only a role and a text."""
    if type(value) is list:
        for each in value:
            if type(each) is not dict or len(each) != 2 or type(each.get("content")) is not str:
                return False
        return True
    return type(value) is str


class _File:
    """A media file in a request. `read(at, count)` returns `count` of its bytes, or fewer at its end."""

    def __init__(self, read: Callable[[int, int], bytes], size_bytes: int) -> None:
        self._bytes, self._size_bytes = read, size_bytes

    def tokens(self) -> float:
        """The tokens of the file; 0 if its header does not give pixels, seconds or pages."""
        head = self._bytes(0, _HEAD_BYTES)
        if len(head) < _HEAD_BYTES:
            return 0.0
        if head.startswith(b"\x89PNG"):
            return _image_tokens(_big(head[16:20]), _big(head[20:24]))
        if head.startswith(b"GIF8"):
            return _image_tokens(_little(head[6:8]), _little(head[8:10]))
        if head.startswith(b"\xff\xd8"):
            return self._jpeg_tokens()
        if head.startswith(b"RIFF"):
            return self._wav_tokens(head) if head[8:12] == b"WAVE" else _webp_tokens(head)
        if head.startswith(b"%PDF"):
            return self._pdf_tokens()
        return self._mp3_tokens(head)

    def _jpeg_tokens(self) -> float:
        at = 2
        for _ in range(_MOST_SEGMENTS):
            segment = self._bytes(at, 9)
            if len(segment) < 9 or segment[0] != 0xFF:
                break
            if segment[1] in _SIZE_SEGMENTS:
                return _image_tokens(_big(segment[7:9]), _big(segment[5:7]))
            at += 2 + _big(segment[2:4])
        return 0.0

    def _wav_tokens(self, head: bytes) -> float:
        bytes_a_s = _little(head[28:32])
        return self._size_bytes / bytes_a_s * _AUDIO_TOKENS_A_S if bytes_a_s else 0.0

    def _mp3_tokens(self, head: bytes) -> float:
        tag_bytes = 0
        if head.startswith(b"ID3"):  # an ID3 tag's length has seven bits a byte
            tag_bytes = 10 + sum((head[6 + n] & 127) << 7 * (3 - n) for n in range(4))
            head = self._bytes(tag_bytes, 4)
        if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE6 != 0xE2:  # not layer III
            return 0.0
        kbit_a_s = (_MPEG_1 if head[1] & 0x18 == 0x18 else _MPEG_2)[head[2] >> 4]
        size_bytes = max(self._size_bytes - tag_bytes, 0)
        return size_bytes * 8 / (kbit_a_s * 1000) * _AUDIO_TOKENS_A_S if kbit_a_s else 0.0

    def _pdf_tokens(self) -> float:
        told = _LINEARIZED.search(self._bytes(0, 1024))
        pages = int(told[1]) if told is not None else self._size_bytes / _PAGE_BYTES
        return min(max(pages, 1), _MOST_PAGES) * _PAGE_TOKENS


def _of_base64(text: bytes) -> float:
    """The tokens of the base64 file in a part's JSON `text`; 0 if its header is of no known type."""
    begun = _BASE64.search(text, 0, _ENDS_BYTES)
    if begun is None:
        return 0.0
    start, size_bytes = begun.end(), (len(text) - begun.end()) * 3 // 4
    if text.find(b"\\", start, start + _ESCAPED_BYTES) >= 0:  # takes 2 µs; to search for "\\/" takes 70 µs
        text, start = text[start : start + _ESCAPED_BYTES].replace(b"\\/", b"/"), 0

    def read(at: int, count: int) -> bytes:
        first = start + at // 3 * 4
        try:
            decoded = binascii.a2b_base64(text[first : first + (at % 3 + count + 2) // 3 * 4])
        except binascii.Error:
            return b""
        return decoded[at % 3 : at % 3 + count]

    return _File(read, size_bytes).tokens()


def _image_tokens(width: int, height: int) -> float:
    squares = -(-width // _PIXELS) * -(-height // _PIXELS)
    return float(min(max(squares, _LEAST_TOKENS), _MOST_IMAGE_TOKENS))


def _webp_tokens(head: bytes) -> float:
    """The tokens of a WebP image (RFC 9649): lossy, lossless or extended."""
    if head[12:16] == b"VP8 ":
        return _image_tokens(_little(head[26:28]) & 0x3FFF, _little(head[28:30]) & 0x3FFF)
    if head[12:16] == b"VP8L":
        bits = _little(head[21:25])
        return _image_tokens((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if head[12:16] == b"VP8X":
        return _image_tokens(_little(head[24:27]) + 1, _little(head[27:30]) + 1)
    return 0.0


def _big(text: bytes) -> int:
    return int.from_bytes(text, "big")


def _little(text: bytes) -> int:
    return int.from_bytes(text, "little")


# The content of a message or part. Any JSON value is allowed, so that media beside unknown values count.
_Content: TypeAlias = "_Part | list[_Part | str | None] | str | float | bool | None"


class _Part(TypedDict, total=False):
    """A message, or a part of a message, in the APIs of OpenAI, Anthropic, Gemini and Ollama."""

    content: _Content
    parts: _Content  # Gemini
    output: _Content  # results of tools in the Responses API
    image: msgspec.Raw
    image_url: msgspec.Raw
    image_embeds: msgspec.Raw
    images: msgspec.Raw  # Ollama
    source: msgspec.Raw
    input_audio: msgspec.Raw
    audio: msgspec.Raw
    audio_url: msgspec.Raw
    video: msgspec.Raw
    video_url: msgspec.Raw
    file: msgspec.Raw
    file_data: msgspec.Raw
    inline_data: msgspec.Raw
    inlineData: msgspec.Raw


class _Prompted(TypedDict, total=False):
    messages: _Content
    input: _Content
    contents: _Content
    images: msgspec.Raw
    image_data: msgspec.Raw  # SGLang
    audio_data: msgspec.Raw
    video_data: msgspec.Raw
    documents: _Content
    queries: _Content
    query: _Content
    text_1: _Content
    text_2: _Content
    inputs: _Content


_prompted = msgspec.json.Decoder(_Prompted)
_listed = msgspec.json.Decoder(list[msgspec.Raw])


def _collect(content: Any, media: _Media) -> None:
    """Add the media in `content`, a decoded `_Content` or `_Prompted`, to `media`."""
    for each in content[:_MOST_OBJECTS] if isinstance(content, list) else (content,):
        if not isinstance(each, dict):
            continue
        for name, value in each.items():
            if not isinstance(value, msgspec.Raw):
                _collect(value, media)
            elif (text := bytes(value)).startswith(b"[") and text.count(b",") < _MOST_OBJECTS:
                for listed in _listed.decode(text):
                    media.add(bytes(listed), is_image=name in _PICTURES)
            else:
                ends = text[:_ENDS_BYTES] + text[-_ENDS_BYTES:]
                if b'"text"' not in ends:  # skip a document in plain text
                    media.add(text, is_image=name in _PICTURES or b"image/" in ends)
