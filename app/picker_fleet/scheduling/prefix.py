"""Which endpoint has served which beginnings of prompts: a bounded memory, the same on every replica that
follows the stream of routes.

For each endpoint the block hashes it served, the least recently served ones dropped first. Of a chain the
later blocks are always the older entries (`add` touches them first), so that a hash in the memory means that
all the hashes before it are there too. `match` relies on that: it searches the end of the match by halves.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence

BLOCKS_AN_ENDPOINT = 31_250
BLOCKS_IN_ALL = 500_000
# Measured with CPython 3.11: an entry takes 190 to 241 bytes, depending on how full the tables are.
BYTES_A_BLOCK = 250


class PrefixIndex:
    """Block hashes by endpoint. One event loop; no I/O.

    At most `blocks` hashes an endpoint and `in_all` together, shared equally by the endpoints: 500 000
    take at most 125 MB (`BYTES_A_BLOCK` each), and 16 endpoints or fewer have the full 31 250 each, which
    are 2 million tokens of prompts.
    """

    def __init__(self, *, blocks: int = BLOCKS_AN_ENDPOINT, in_all: int = BLOCKS_IN_ALL) -> None:
        self._blocks = blocks
        self._in_all = in_all
        self._served: dict[str, OrderedDict[bytes, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._served.values()))

    @property
    def share(self) -> int:
        """How many hashes an endpoint may have, with as many endpoints as there are."""
        return min(self._blocks, self._in_all // max(1, len(self._served)))

    @property
    def addresses(self) -> Collection[str]:
        """Endpoints that something is known of."""
        return self._served.keys()

    def add(self, address: str, hashes: Sequence[bytes]) -> None:
        """Note that `address` was given a prompt of `hashes` (a chain, first block first)."""
        if not hashes:
            return
        served = self._served.get(address)
        if served is None:
            served = self._served[address] = OrderedDict()
            for others in self._served.values():
                self._trim(others)
        newest = served.move_to_end
        for link in reversed(hashes[: self.share]):
            served[link] = None
            newest(link)
        self._trim(served)

    def match(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """How many of `hashes`, from the first on, each endpoint has served; endpoints with none left out.

        Takes a lookup an endpoint, and log2(len(hashes)) more for each that has the first block.
        """
        if not hashes:
            return {}
        first = hashes[0]
        return {
            address: _matched(hashes, served) for address, served in self._served.items() if first in served
        }

    def keep(self, addresses: Collection[str]) -> None:
        """Forget every endpoint that is not in `addresses`."""
        for gone in self._served.keys() - set(addresses):
            del self._served[gone]

    def _trim(self, served: OrderedDict[bytes, None]) -> None:
        for _ in range(len(served) - self.share):
            served.popitem(last=False)


def _matched(hashes: Sequence[bytes], served: Collection[bytes]) -> int:
    """Where `hashes`, of which the first is in `served`, cease to be."""
    low, high = 1, len(hashes)
    while low < high:
        middle = (low + high) // 2
        if hashes[middle] in served:
            low = middle + 1
        else:
            high = middle
    return low
