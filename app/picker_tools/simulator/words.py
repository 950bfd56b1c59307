"""Words for generated tokens: the same for the same seed and prompt, plain ASCII, safe inside JSON."""

import hashlib
import itertools
import random

_ONSETS = ("b", "br", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v")
_VOWELS = ("a", "e", "i", "o", "u")
_ENDS = ("", "l", "n", "r", "s", "t", "la", "no")
VOCABULARY = tuple(f" {''.join(parts)}".encode() for parts in itertools.product(_ONSETS, _VOWELS, _ENDS))


class Words:
    """The words that follow `prompt`, each with the space before it."""

    def __init__(self, *, seed: int, prompt: bytes) -> None:
        # random.Random would take the prompt itself as its seed, but needs milliseconds for 400 KB of it.
        digest = hashlib.blake2b(prompt, digest_size=8, key=str(seed).encode()[:64]).digest()
        self._random = random.Random(int.from_bytes(digest, "big"))

    def take(self, count: int) -> list[bytes]:
        """The next `count`; how many are taken at a time does not change what comes."""
        return self._random.choices(VOCABULARY, k=count)
