"""Maps session tokens and session keys of clients to endpoints, for the scorer `session-affinity`."""

from bisect import bisect
from collections.abc import Collection, Mapping
from typing import Final

from xxhash import xxh3_64_intdigest

from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.state.accounting_token import LENGTH, Keyring

SESSION_HEADER: Final = "x-session-token"  # a header of both requests and responses

_SESSION_PURPOSE = "session"


class SessionTokens:
    """Issues and resolves session tokens for the endpoints of the current snapshot. One event loop.

    A client that returns the token of its last response asks for the endpoint that sent the response. A
    session token is the fleet's signature of an endpoint's address. So clients learn nothing about the pool,
    and a client can ask only for an endpoint that has served this client (or another client that passed its
    token on).
    """

    def __init__(self, keys: Keyring, endpoints: SnapshotCell) -> None:
        self._keys = keys
        self._endpoints = endpoints
        self._signed: dict[str, tuple[str, ...]] = {}  # address -> its valid tokens, one per signing key
        self._addresses: dict[str, str] = {}  # valid token -> address
        self._addresses_version = ("", -1)

    def token_of(self, address: str) -> str:
        """The token for a client that `address` serves."""
        return self._keys.sign(_SESSION_PURPOSE, address)

    def endpoint_of(self, token: str) -> str:
        """The endpoint that `token` names; '' if the fleet did not sign it, or the endpoint has left."""
        known = self._endpoints.current
        version = (known.version, self._keys.version)
        if version != self._addresses_version:
            former = self._signed if version[1] == self._addresses_version[1] else {}
            self._signed = {
                address: former.get(address) or tuple(self._keys.signatures(_SESSION_PURPOSE, address))
                for address in (endpoint.address for endpoint in known.decoders)
            }
            self._addresses = {token: address for address, tokens in self._signed.items() for token in tokens}
            self._addresses_version = version
        return self._addresses.get(token, "")


class SessionKeys:
    """Maps session keys, which clients choose, to endpoints; all replicas compute the same mapping.

    Multi-probe consistent hashing (Appleton and O'Reilly 2015): each endpoint that takes requests has one
    point on a ring, each key has several, and the key gets the endpoint that follows one of its points most
    closely. So when an endpoint joins or leaves, only its own keys move. One event loop.
    """

    _PROBES = 21  # points of a key; the endpoint with most keys then has 1.05 times the mean
    _ROUND = 2**64

    def __init__(self, endpoints: SnapshotCell) -> None:
        self._endpoints = endpoints
        self._version = ""
        self._ring: list[tuple[int, str]] = []

    def endpoint_of(
        self, key: str, subset: Collection[str] | None, selector: Mapping[str, str] | None = None
    ) -> str:
        """The endpoint for session key `key`, in `subset` and with the labels in `selector`; '' if none."""
        known = self._endpoints.current
        if known.version != self._version:
            ready = (each.address for each in known.decoders if each.ready)
            self._ring = sorted((xxh3_64_intdigest(address.encode()), address) for address in ready)
            self._version = known.version
        ring = self._ring
        if subset is not None or selector:
            wanted = (selector or {}).items()
            able = {each.address for each in known.decoders if wanted <= each.labels.items()}
            ring = [each for each in ring if each[1] in able and (subset is None or each[1] in subset)]
        if not ring:
            return ""
        points = [xxh3_64_intdigest(key.encode(), probe) for probe in range(self._PROBES)]
        following = [(ring[bisect(ring, (point, "")) % len(ring)], point) for point in points]
        return min(following, key=lambda found: (found[0][0] - found[1]) % self._ROUND)[0][1]


def session_token_of(headers: Mapping[str, bytes]) -> str:
    """The session token in a request's headers. '' if it is missing or malformed: affinity is only a
    preference, so a malformed token does not refuse the request."""
    raw = headers.get(SESSION_HEADER, b"").strip()
    return raw.decode() if len(raw) == LENGTH and raw.isalnum() else ""
