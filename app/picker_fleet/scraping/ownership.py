"""Which replica scrapes which endpoint: rendezvous hashing (Thaler and Ravishankar, 1998).

Every replica weighs each pair of endpoint and replica by a hash; the heaviest replica owns the endpoint. No
table is shared: who agrees on the replicas agrees on the owners. A replica that leaves gives up only what it
owned, evenly to the others; one that joins takes only what becomes its own.
"""

import hashlib
from collections.abc import Iterable, Sequence


def owner(address: str, replicas: Sequence[str]) -> str:
    """The replica that scrapes `address`, whatever the order of `replicas`.

    Raises:
        ValueError: `replicas` is empty.
    """
    if not replicas:
        raise ValueError("nobody to own an endpoint: there are no replicas")
    return max(replicas, key=lambda replica: (_weight(address, replica), replica))


def owned(addresses: Iterable[str], replica: str, replicas: Sequence[str]) -> frozenset[str]:
    """Those of `addresses` that `replica` owns among `replicas`; none if it is not one of them."""
    if replica not in replicas:
        return frozenset()
    return frozenset(address for address in addresses if owner(address, replicas) == replica)


def _weight(address: str, replica: str) -> bytes:
    # Python's own hash differs from process to process. The length keeps pairs apart that join alike.
    text = f"{len(address)}:{address}{replica}"
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
