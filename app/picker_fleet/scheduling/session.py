"""Session tokens: a client that brings back the one of its last answer asks for the endpoint that gave it.

A token is the fleet's signature of an endpoint's address. Clients learn nothing of the pool by it, and can
ask for no other endpoint than one that has served them (or somebody who told them).
"""

from collections.abc import Mapping
from typing import Final

from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.signing import LENGTH, Keyring

HEADER: Final = "x-session-token"  # of a request, and of an answer
_PURPOSE = "session"
_MOST_TOKENS = 10_000


class SessionTokens:
    """The tokens of the endpoints known at the moment. One event loop."""

    def __init__(self, keys: Keyring, endpoints: SnapshotCell) -> None:
        self._keys = keys
        self._endpoints = endpoints
        self._tokens: dict[str, str] = {}  # by address; under the key that signs now
        self._tokens_version = -1
        self._addresses: dict[str, str] = {}  # by token, under any key
        self._addresses_version = ("", -1)

    def token_of(self, address: str) -> str:
        """What a client that `address` serves is to bring back."""
        if self._tokens_version != self._keys.version or len(self._tokens) > _MOST_TOKENS:
            self._tokens, self._tokens_version = {}, self._keys.version
        token = self._tokens.get(address)
        if token is None:
            token = self._tokens[address] = self._keys.sign(_PURPOSE, address)
        return token

    def endpoint_of(self, token: str) -> str:
        """The endpoint whose token it is; '' if it is none of the fleet's, or its endpoint has left."""
        known = self._endpoints.current
        version = (known.version, self._keys.version)
        if version != self._addresses_version:
            self._addresses = {
                token: endpoint.address
                for endpoint in known.endpoints
                for token in self._keys.signatures(_PURPOSE, endpoint.address)
            }
            self._addresses_version = version
        return self._addresses.get(token, "")


def session_of(headers: Mapping[str, bytes]) -> str:
    """The token that a request brings; '' if it cannot be one: affinity is a wish, so nothing is refused."""
    raw = headers.get(HEADER, b"").strip()
    return raw.decode() if len(raw) == LENGTH and raw.isalnum() else ""
