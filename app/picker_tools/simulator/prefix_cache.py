"""Automatic prefix caching as vLLM has it: what was computed of a prompt once need not be again. Pure."""

from collections import OrderedDict
from collections.abc import Sequence

from xxhash import xxh64_digest

from picker_tools.simulator.ask import BYTES_PER_TOKEN


def prompt_blocks(prompt: bytes, block_size_tokens: int, adapter: str | None) -> tuple[bytes, ...]:
    """A chained hash for each whole block of `prompt`, but for its last token: that is always computed."""
    size = block_size_tokens * BYTES_PER_TOKEN
    link = xxh64_digest((adapter or "").encode())
    links = []
    for start in range(0, len(prompt) - size, size):
        link = xxh64_digest(prompt[start : start + size] + link)
        links.append(link)
    return tuple(links)


class PrefixCache:
    """The last `most` blocks of prompts, the least recently used ones dropped first.

    Blocks of running requests are in it, as the most recently used ones. What running requests generate is
    neither cached nor taken off its size.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def cached(self, blocks: Sequence[bytes]) -> int:
        """How many of a prompt's `blocks`, from the first on, are there."""
        for count, block in enumerate(blocks):
            if block not in self._blocks:
                return count
        return len(blocks)

    def use(self, blocks: Sequence[bytes]) -> None:
        """Note that a prompt's `blocks` are computed; of a chain the last are the first to go."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        for _ in range(len(self._blocks) - self._most):
            self._blocks.popitem(last=False)
