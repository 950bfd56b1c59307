"""Continuous batching as vLLM schedules it: which sequences run, wait, and have KV blocks and LoRA slots.

Pure: the engine has no clock and no I/O. At most `max_num_seqs` sequences run; the rest wait first come,
first served. If the KV blocks of a sequence do not fit, the sequences behind it wait, too. A sequence that
lacks only a LoRA slot is skipped and keeps its position. When a running sequence needs a KV block and no
block is free, the newest running sequence is preempted: it frees its blocks, waits at the head of the queue
and is computed again.

Two servers may share the work of a request (`transfer.py`). The prefill server's sequence keeps its blocks
after its end, until a call of `free`. The decode server's sequence, once admitted, waits for the KV cache,
until a call of `pulled`. `schedule` and `grow` are for callers that pace each sequence, `begin_step` and
`end_step` for callers that compute the whole batch step by step.
"""

import enum
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from xxhash import xxh64_digest

from picker_fleet.domain.errors import PickerError
from picker_tools.simulator.openai_api import BYTES_PER_TOKEN


def prompt_blocks(prompt: bytes, block_size_tokens: int, adapter: str | None) -> tuple[bytes, ...]:
    """A chained hash for each whole block of `prompt` without its last token, which is always computed."""
    size = block_size_tokens * BYTES_PER_TOKEN
    link = xxh64_digest((adapter or "").encode())
    links = []
    for start in range(0, len(prompt) - size, size):
        link = xxh64_digest(prompt[start : start + size] + link)
        links.append(link)
    return tuple(links)


class PrefixCache:
    """An LRU cache of at most `capacity` prompt blocks.

    A request's blocks enter the cache, as most recently used, when the request is admitted. Generated tokens
    are not cached and do not reduce the capacity.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def cached(self, blocks: tuple[bytes, ...]) -> int:
        """How many of the first blocks of a prompt's `blocks` are cached."""
        for count, block in enumerate(blocks):
            if block not in self._blocks:
                return count
        return len(blocks)

    def use(self, blocks: tuple[bytes, ...]) -> None:
        """Record that a prompt's `blocks` were computed. Later blocks of a prompt are evicted first."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        for _ in range(len(self._blocks) - self._capacity):
            self._blocks.popitem(last=False)


class ContextTooLong(PickerError):
    """Raised if prompt and answer together need more KV blocks than the server has."""


class Phase(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Limits:
    """The capacity of a simulated server. At most `max_loras` distinct adapters run at once."""

    max_num_seqs: int = 256
    kv_blocks: int = 16_384
    block_size_tokens: int = 16
    max_loras: int = 1


@dataclass(slots=True, eq=False)
class Sequence:
    """One request as a sequence of tokens, which only the engine changes. `adapter` None: the base model.

    `prompt_blocks` are hashes of the prompt's blocks, empty without prefix caching; `cached_tokens` counts
    the prompt tokens found in the prefix cache at the first admission. `computed_tokens`, used only by steps,
    counts the tokens in the KV cache. `keeps_blocks`: once complete, the sequence keeps its blocks until a
    call of `free`. `pulls`: another server has computed the prompt, whose KV cache has not arrived yet.
    """

    prompt_tokens: int
    max_tokens: int
    adapter: str | None = None
    prompt_blocks: tuple[bytes, ...] = ()
    keeps_blocks: bool = False
    pulls: bool = False
    cached_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    preempted: bool = False
    blocks: int = 0
    phase: Phase = Phase.WAITING

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.generated_tokens

    @property
    def remaining_tokens(self) -> int:
        return self.max_tokens - self.generated_tokens


@dataclass(slots=True)
class Step:
    """The work of one step of the batch: how many `tokens` each sequence computes.

    `left_tokens` remain of the step's budget. `decoding` counts the sequences that compute one token after
    their context, and `kv_tokens` counts the tokens of these contexts; `prefill_tokens` counts tokens that
    are computed for other sequences. `pulling` has the sequences admitted in this step whose prompts' KV
    cache must be transferred.
    """

    left_tokens: int
    tokens: dict[Sequence, int] = field(default_factory=dict)
    decoding: int = 0
    kv_tokens: int = 0
    prefill_tokens: int = 0
    pulling: list[Sequence] = field(default_factory=list)

    def add(self, sequence: Sequence) -> None:
        """Compute the missing tokens of `sequence` in this step, within the step's budget."""
        if sequence.pulls:
            return
        missing = sequence.context_tokens - sequence.computed_tokens
        tokens = min(missing, self.left_tokens)
        if not tokens:
            return
        self.tokens[sequence] = tokens
        self.left_tokens -= tokens
        if missing == 1:
            self.decoding += 1
            self.kv_tokens += sequence.computed_tokens
        else:
            self.prefill_tokens += tokens


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of the engine at one moment. `kv_usage` is 0 to 1; adapters are in order of arrival.

    `queried_tokens` counts the prompt tokens that were looked up in the prefix cache so far, `hit_tokens` the
    prompt tokens that were found there.
    """

    running: int
    waiting: int
    kv_usage: float
    running_adapters: tuple[str, ...]
    waiting_adapters: tuple[str, ...]
    preemptions: int
    queried_tokens: int = 0
    hit_tokens: int = 0


class Engine:
    """The admission, batching and KV memory of one simulated server."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()
        self._running: dict[Sequence, None] = {}  # running sequences in order of admission
        self._adapters: Counter[str] = Counter()  # adapter -> number of running sequences
        self._free_blocks = limits.kv_blocks
        self._preemptions = 0
        self._preempted_in_step = False
        self._prefixes = PrefixCache(limits.kv_blocks)
        self._queried_tokens = 0
        self._hit_tokens = 0

    def submit(self, sequence: Sequence) -> None:
        """Put a new `sequence` at the end of the queue.

        Raises:
            ContextTooLong: `sequence` would not fit even if it ran alone.
        """
        needed = self._blocks_for(sequence.prompt_tokens + sequence.max_tokens)
        if needed > self.limits.kv_blocks:
            raise ContextTooLong(
                f"{sequence.prompt_tokens} prompt tokens and {sequence.max_tokens} to generate need "
                f"{needed} KV blocks of {self.limits.block_size_tokens} tokens; "
                f"this server has {self.limits.kv_blocks}"
            )
        self._waiting[sequence] = None

    def schedule(self, budget_tokens: float = math.inf) -> list[Sequence]:
        """Admit waiting sequences that fit, until they use up `budget_tokens`; return the admitted ones.

        Each sequence gets blocks for its context and one more token, so that a preempted sequence makes
        progress each time it is admitted again.
        """
        room = self.limits.max_num_seqs - len(self._running)
        admitted: list[Sequence] = []
        for sequence in self._waiting:
            if len(admitted) >= room or budget_tokens <= 0:
                break
            if not self._has_slot(sequence.adapter):
                continue
            needed = self._blocks_for(sequence.context_tokens + 1)
            if needed > self._free_blocks:
                break
            self._free_blocks -= needed
            sequence.blocks = needed
            sequence.phase = Phase.RUNNING
            if sequence.adapter is not None:
                self._adapters[sequence.adapter] += 1
            self._look_up(sequence)
            if not sequence.pulls:
                budget_tokens -= sequence.context_tokens - sequence.computed_tokens
            admitted.append(sequence)
        for sequence in admitted:
            del self._waiting[sequence]
            self._running[sequence] = None
        return admitted

    def grow(self, sequence: Sequence, tokens: int) -> int:
        """Generate up to `tokens` (1 to `remaining_tokens`) tokens for a running `sequence`; preempt newer
        sequences if memory is short. Returns the number of tokens that fit into memory; 0 means that
        `sequence` was the newest and was itself preempted.
        """
        while True:
            needed = self._blocks_for(sequence.context_tokens + tokens) - sequence.blocks
            if needed <= self._free_blocks:
                self._free_blocks -= needed
                sequence.blocks += needed
                sequence.generated_tokens += tokens
                return tokens
            newest = next(each for each in reversed(self._running) if not each.pulls)
            if newest is not sequence:
                self._preempt(newest)
                continue
            available = (sequence.blocks + self._free_blocks) * self.limits.block_size_tokens
            tokens = available - sequence.context_tokens
            if tokens <= 0:
                self._preempt(sequence)
                return 0

    def begin_step(self, budget_tokens: int) -> Step:
        """Schedule a step of at most `budget_tokens`, as vLLM V1 does: first running sequences, in order of
        admission, then waiting sequences. A step after a preemption admits no sequence."""
        step = Step(budget_tokens)
        running = tuple(self._running)
        for sequence in running:
            step.add(sequence)
        if not running or not self._preempted_in_step:
            for sequence in self.schedule(step.left_tokens):
                step.add(sequence)
                if sequence.pulls:
                    step.pulling.append(sequence)
        self._preempted_in_step = False
        return step

    def end_step(self, step: Step) -> list[Sequence]:
        """Count the tokens of `step`, and release complete sequences. Returns the sequences that got their
        next token."""
        preemptions = self._preemptions
        grown = []
        for sequence, tokens in step.tokens.items():
            if sequence.phase is not Phase.RUNNING:  # the sequence was preempted or abandoned
                continue
            sequence.computed_tokens += tokens
            if sequence.computed_tokens == sequence.context_tokens and self.grow(sequence, 1):
                grown.append(sequence)
                if not sequence.remaining_tokens:
                    self.release(sequence)
        self._preempted_in_step = self._preemptions > preemptions
        return grown

    def release(self, sequence: Sequence) -> None:
        """End a finished or abandoned `sequence`, running or waiting, and free its blocks. Idempotent.

        If a finished sequence keeps its blocks, `free` frees them.
        """
        if sequence.phase is Phase.RUNNING:
            self._stop(sequence)
            if not sequence.keeps_blocks or sequence.remaining_tokens:
                self.free(sequence)
        elif sequence.phase is Phase.WAITING:
            del self._waiting[sequence]
        sequence.phase = Phase.ENDED

    def free(self, sequence: Sequence) -> None:
        """Free the KV blocks of `sequence`. Idempotent."""
        self._free_blocks += sequence.blocks
        sequence.blocks = 0

    def pulled(self, sequence: Sequence, *, arrived: bool) -> None:
        """End the transfer for `sequence`; unless the KV cache `arrived`, this server computes the prompt."""
        sequence.pulls = False
        if arrived:  # only the prompt's last token is left to compute, for the first token of the answer
            sequence.computed_tokens = sequence.prompt_tokens - 1

    def load(self) -> EngineLoad:
        waiting = dict.fromkeys(sequence.adapter for sequence in self._waiting if sequence.adapter)
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_usage=1 - self._free_blocks / self.limits.kv_blocks,
            running_adapters=tuple(self._adapters),
            waiting_adapters=tuple(waiting),
            preemptions=self._preemptions,
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_tokens,
        )

    def _look_up(self, sequence: Sequence) -> None:
        # Older sequences have taken a preempted sequence's blocks; like vLLM, do not count its lookup again.
        if sequence.preempted:
            return
        blocks = sequence.prompt_blocks
        found_tokens = self._prefixes.cached(blocks) * self.limits.block_size_tokens
        # Blocks count bytes, so the last block may end within the last token, which is always computed.
        sequence.cached_tokens = min(found_tokens, sequence.prompt_tokens - 1)
        self._prefixes.use(blocks)
        sequence.computed_tokens = sequence.cached_tokens
        self._queried_tokens += sequence.prompt_tokens
        self._hit_tokens += sequence.cached_tokens

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size_tokens)

    def _has_slot(self, adapter: str | None) -> bool:
        return adapter is None or adapter in self._adapters or len(self._adapters) < self.limits.max_loras

    def _preempt(self, sequence: Sequence) -> None:
        self._stop(sequence)
        self.free(sequence)
        sequence.phase = Phase.WAITING
        sequence.preempted = True
        sequence.computed_tokens = 0
        self._waiting[sequence] = None
        self._waiting.move_to_end(sequence, last=False)
        self._preemptions += 1

    def _stop(self, sequence: Sequence) -> None:
        del self._running[sequence]
        if sequence.adapter is not None:
            self._adapters[sequence.adapter] -= 1
            if not self._adapters[sequence.adapter]:
                del self._adapters[sequence.adapter]
