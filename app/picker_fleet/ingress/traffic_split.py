"""Chooses the variant of a model for a request, by a keyed hash of the request's identity. Pure.

A request's identity is its id if the gateway has set the id, else its flow and body (intake.py). Every
replica has the pool's key (state/accounting_token.py), so all replicas choose the same variant for an
identity, also for a retry, without a call to Redis. Clients lack the key, so they cannot predict the variant
of an identity. The shares hold on average: a variant with share p gets n p of n requests, with a standard
deviation of sqrt(n p (1 - p)) (docs/decisions.md, 26).
"""

from bisect import bisect_right
from collections.abc import Iterable
from hashlib import blake2b
from itertools import accumulate
from typing import NamedTuple

from xxhash import xxh3_128_digest

_HASH_BYTES = 8


class Split(NamedTuple):
    """The variants of a model: their names and cumulative weights."""

    names: tuple[str, ...]
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, targets: Iterable[tuple[str, int]]) -> "Split":
        """Make a split from the variants' names and weights; a variant with weight 0 is never chosen."""
        weighted = [(name, weight) for name, weight in targets if weight]
        return cls(tuple(name for name, _ in weighted), tuple(accumulate(weight for _, weight in weighted)))

    def variant(self, key: bytes, identity: bytes) -> str:
        """The name of the variant that the pool's `key` chooses for `identity`."""
        digest = blake2b(identity, key=key, digest_size=_HASH_BYTES).digest()
        # `at` is an integer from 0 up to, but not including, the sum of the weights.
        at = int.from_bytes(digest, "big") * self.bounds[-1] >> 8 * _HASH_BYTES
        return self.names[bisect_right(self.bounds, at)]


def identity_of_body(key: bytes, flow: str, body: bytes) -> bytes:
    """The identity of a request whose id the client may have chosen.

    The hash of the body has a secret seed, so that a client cannot make bodies that collide. The seeded hash
    takes 7 µs for a body of 400 KB; a keyed BLAKE2b would take 370 µs.
    """
    digest = xxh3_128_digest(body, seed=int.from_bytes(key[:8], "big"))
    return flow.encode(errors="surrogatepass") + digest
