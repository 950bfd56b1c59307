"""The hashes that stand for a prompt's beginnings: equal prefixes give equal hashes, on every replica.

h_0 = xxh64(model and cache salt), h_i = xxh64(block_i, h_(i-1)): so h_i stands for the whole prompt up to
and with block i (PROTOCOL, "Prefix hashing"). Only whole blocks count, and only the first `most_bytes` of a
prompt are looked at: what a request may cost here is bounded. A prompt is taken as the client wrote it in its
JSON: a client that writes the same in another way (spaces, escapes) has hashes of its own, and nothing has to
be built of what may be megabytes.
"""

from xxhash import xxh64_digest

from picker_fleet.body import Body

BLOCK_BYTES = 256  # about 64 tokens
MOST_BYTES = 100 * 1024
HASH_BYTES = 8

_AHEAD = ("tools", "functions", "instructions")  # what chat templates put before the first message
_PROMPTS = ("messages", "prompt", "input")
_CLOSING = b']}"'
_EMPTY = (b"", b"[]", b"{}", b'""', b"null", b"false")


def prompt_bytes(body: Body, most_bytes: int = MOST_BYTES) -> bytes:
    """The first `most_bytes` of the prompt in a request's body; b'' if it has none.

    A longer prompt that begins with a shorter one gives bytes that begin with the shorter one's: a chat
    with one more message, a text with more text.
    """
    found: list[bytes] = []
    room = most_bytes
    for name in _AHEAD:
        text = memoryview(body.values.get(name, b""))
        if room > 0 and text not in _EMPTY:
            found.append(bytes(text[:room]) + b"\x1e")
            room -= len(found[-1])
    for name in _PROMPTS:
        text = memoryview(body.values.get(name, b""))
        if text not in _EMPTY:
            open_end = text[:-1] if text[-1] in _CLOSING else text  # more may follow there
            found.append(bytes(open_end[: max(room, 0)]))
            break
    return b"".join(found)[:most_bytes]


def block_hashes(
    model: str, prompt: bytes, *, block_bytes: int = BLOCK_BYTES, salt: bytes = b""
) -> tuple[bytes, ...]:
    """A hash of eight bytes for each whole block of `prompt`, first to last.

    `model` is the target model; `salt` parts tenants that must not share a cache (`cache_salt`).
    """
    link = xxh64_digest(b"%s\x1f%s" % (model.encode(errors="surrogatepass"), salt))
    hashes: list[bytes] = []
    for start in range(0, len(prompt) - block_bytes + 1, block_bytes):
        link = xxh64_digest(prompt[start : start + block_bytes] + link)
        hashes.append(link)
    return tuple(hashes)
