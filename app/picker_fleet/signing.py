"""The fleet's signature on what leaves it and comes back: tokens, session tokens, questions of replicas.

The keys are the fleet's, kept in Redis; each heartbeat offers those that this replica holds and takes those
in force (lua/heartbeat.lua), so that they survive the loss of the shared state. The newest key is distributed
a whole period before it signs, so that every replica knows it before it meets a signature.

A signature is 28 visible characters: the name of its key and 96 bits of a keyed BLAKE2b.
"""

import hashlib
import hmac
import secrets
from typing import Final

NO_TOKEN: Final = "no-ticket"
UNSIGNED: Final = "unsigned"
UNKNOWN_KEY: Final = "unknown-key"
BAD_SIGNATURE: Final = "bad-signature"
FAULTS: Final = (NO_TOKEN, UNSIGNED, UNKNOWN_KEY, BAD_SIGNATURE)

_KEY_BYTES = 16
_NAME = 4  # characters that name the key, so that one check is enough
LENGTH: Final = _NAME + 24  # of a signature


class Keyring:
    """The keys that this replica knows. Until it knows the fleet's it uses one of its own.

    `version` grows with each change of the keys. `accepts_unsigned` says that a replica of a version that
    does not sign has run lately (docs/upgrading.md).
    """

    def __init__(self) -> None:
        self.version = 0
        self.accepts_unsigned = False
        self._fresh = secrets.token_hex(_KEY_BYTES)  # a candidate for the fleet's next key
        self._keys: tuple[str, ...] = ()  # newest first
        self._use((self._fresh,))

    def offer(self) -> str:
        """For the heartbeat: an unused key, then the known ones, newest first, separated by blanks."""
        return " ".join((self._fresh, *self._keys))

    def take(self, keys: str) -> None:
        """The heartbeat's answer: the keys in force, newest first, separated by blanks."""
        keys_in_force = tuple(keys.split())
        if not keys_in_force or keys_in_force == self._keys:
            return
        self._keys = keys_in_force
        if self._fresh in keys_in_force:
            self._fresh = secrets.token_hex(_KEY_BYTES)
        self._use(keys_in_force)

    def _use(self, keys: tuple[str, ...]) -> None:
        self._macs = {}
        for key in keys:
            mac = hashlib.blake2b(key=bytes.fromhex(key), digest_size=(LENGTH - _NAME) // 2)
            self._macs[hashlib.blake2b(bytes.fromhex(key)).hexdigest()[:_NAME]] = mac
        # The second: the newest one may not have reached every replica.
        self._name = list(self._macs)[min(1, len(self._macs) - 1)]
        self.version += 1

    def sign(self, purpose: str, text: str) -> str:
        """The signature of `text`, good for `purpose` alone."""
        return self._signature(self._name, purpose, text)

    def signatures(self, purpose: str, text: str) -> list[str]:
        """All signatures of `text` that are good at the moment."""
        return [self._signature(name, purpose, text) for name in self._macs]

    def fault(self, purpose: str, text: str, signature: str) -> str:
        """What is wrong with the `signature` of `text`: one of `FAULTS`; '' if nothing is."""
        if len(signature) != LENGTH:
            return BAD_SIGNATURE if signature else UNSIGNED
        name = signature[:_NAME]
        if name not in self._macs:
            return UNKNOWN_KEY
        right = self._signature(name, purpose, text)
        return "" if hmac.compare_digest(right.encode(), signature.encode()) else BAD_SIGNATURE

    def _signature(self, name: str, purpose: str, text: str) -> str:
        mac = self._macs[name].copy()
        mac.update(f"{purpose}\n{text}".encode())
        return name + mac.hexdigest()
