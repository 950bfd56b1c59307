"""The hashes that stand for a prompt's beginnings: equal prefixes give equal hashes, on every replica.

h_0 = xxh64(model and cache salt), h_i = xxh64(block_i, h_(i-1)): so h_i stands for the whole prompt up to
and with block i (PROTOCOL, "Prefix hashing"). Only whole blocks count, and only the first `most_bytes` of a
prompt are looked at: what a request may cost here is bounded.
"""

from collections.abc import Iterator, Mapping

import orjson
from xxhash import xxh64_digest

BLOCK_BYTES = 256  # about 64 tokens
MOST_BYTES = 100 * 1024
HASH_BYTES = 8

_AHEAD = ("tools", "functions", "instructions")  # what chat templates put before the first message


def prompt_bytes(document: Mapping[str, object], most_bytes: int = MOST_BYTES) -> bytes:
    """The first `most_bytes` of the prompt in a request's body, in one canonical form.

    A longer prompt that begins with a shorter one gives bytes that begin with the shorter one's: a chat
    with one more message, a text with more text. b'' if the body has no prompt.
    """
    found: list[bytes] = []
    length = 0
    for piece in _pieces(document, most_bytes):
        found.append(piece)
        length += len(piece)
        if length >= most_bytes:
            break
    return b"".join(found)[:most_bytes]


def block_hashes(
    model: str, prompt: bytes, *, block_bytes: int = BLOCK_BYTES, salt: str = ""
) -> tuple[bytes, ...]:
    """A hash of eight bytes for each whole block of `prompt`, first to last.

    `model` is the target model; `salt` parts tenants that must not share a cache (`cache_salt`).
    """
    link = xxh64_digest(f"{model}\x1f{salt}".encode(errors="surrogatepass"))
    hashes: list[bytes] = []
    for start in range(0, len(prompt) - block_bytes + 1, block_bytes):
        link = xxh64_digest(prompt[start : start + block_bytes] + link)
        hashes.append(link)
    return tuple(hashes)


def _pieces(document: Mapping[str, object], most_bytes: int) -> Iterator[bytes]:
    for name in _AHEAD:
        if document.get(name):
            yield from _value(document[name], most_bytes)
    for name in ("messages", "prompt", "input"):
        if document.get(name):
            yield from _value(document[name], most_bytes)
            return


def _value(value: object, most_bytes: int) -> Iterator[bytes]:
    """A text as it is; of a list each element, closed by a separator that no JSON text holds."""
    if isinstance(value, str):
        yield value[:most_bytes].encode(errors="surrogatepass")
    elif isinstance(value, list) and value and isinstance(value[0], int):
        # Token ids: each takes a byte at least, so that more of them than that cannot matter.
        yield b"".join(b"%d\x1e" % token for token in value[:most_bytes] if isinstance(token, int))
    elif isinstance(value, list):
        for element in value:
            yield _element(element, most_bytes) + b"\x1e"
    else:
        yield _element(value, most_bytes) + b"\x1e"


def _element(element: object, most_bytes: int) -> bytes:
    if isinstance(element, str):
        return element[:most_bytes].encode(errors="surrogatepass")
    if isinstance(element, dict) and isinstance(element.get("content"), str) and len(element) == 2:
        # The plain message, which most are: no need to write all of a long one to use its beginning.
        return f"{element.get('role')}\x1f{element['content'][:most_bytes]}".encode(errors="surrogatepass")
    return orjson.dumps(element, option=orjson.OPT_SORT_KEYS)
