"""Decides whether to split a request, that is, whether an endpoint other than its decode endpoint computes
its prompt. Pure.

Every request waits at its decode endpoint for earlier prompts and for room in the KV cache. A split request
also waits for the prefill endpoint and for the transfer of its KV cache. The prompt of a whole request delays
the answers that run on the decode endpoint by the time of its prefill, which is the reason to separate the
stages (DistServe, Zhong et al. 2024). If the prefill endpoint also writes answers, a split delays its
answers. `auto` takes the choice that adds less predicted waiting time, over all requests that it delays.

Until both choices of a model have been observed, prompts of more than `START_TOKENS` are split: the default
of Dynamo's `max-local-prefill-length`, whose guide shows that GPUs prefill shorter prompts inefficiently. A
few requests take the other choice, to keep both predictions current.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

START_TOKENS: Final = 1000
LEAST_TOKENS: Final = 16  # a shorter prompt fills no block of vLLM's KV cache: nothing could be transferred
# The fraction of requests that take the slower choice if that is hardly slower. If the slower choice would
# take n times as long, 1/n of this fraction takes it: exploring adds at most this fraction to the time.
_EXPLORED: Final = 1 / 64
_EXPLORED_UNKNOWN: Final = 1 / 8  # replaces _EXPLORED until some fifty requests have shown the choice's time


class StageTimes(NamedTuple):
    """Predicted times (s) to one request's first token, None if unknown, `whole_s` on its decode endpoint
    alone, `split_s` with its prefill endpoint. `own_s` is the own prompt's part of `whole_s`. The prompt
    would delay `delayed` answers on its decode endpoint, `delayed_split` on its prefill endpoint."""

    whole_s: float | None = None
    split_s: float | None = None
    own_s: float = 0.0
    delayed: float = 0.0
    delayed_split: float = 0.0


class SplitDecision(NamedTuple):
    """`tokens`: how many tokens of the prompt are cached on no decode endpoint. `explores`: the decision
    takes the choice that is predicted to be worse, to learn its time."""

    is_split: bool
    tokens: float
    times: StageTimes = StageTimes()
    explores: bool = False

    def __str__(self) -> str:
        whole_s, split_s, own_s, delayed, delayed_split = self.times
        text = f"{'split' if self.is_split else 'whole'}: {self.tokens:.0f} uncached tokens"
        if whole_s is not None:
            text += f", whole {whole_s:.2f} s{_delay(own_s, delayed)}"
        if split_s is not None:
            text += f", split {split_s:.2f} s{_delay(own_s, delayed_split)}"
        return f"{text}; chosen to learn its time" if self.explores else text


def _delay(own_s: float, answers: float) -> str:
    return f" and {own_s:.2f} s for each of {answers:.0f} answers" if answers else ""


def decide(
    tokens: float, threshold: int | None, times: StageTimes, draw: Callable[[], float] | None
) -> SplitDecision:
    """Whether to split a request with `tokens` uncached tokens; a `threshold` of None is `auto`. `draw`
    returns random numbers in [0, 1); None: the request's times will not be known, so never explore."""
    if threshold is not None:
        return SplitDecision(tokens > threshold, tokens)
    if tokens < LEAST_TOKENS:
        return SplitDecision(False, tokens)
    whole_s, split_s, own_s, delayed, delayed_split = times
    if whole_s is None or split_s is None:
        is_better = tokens > START_TOKENS
        is_known = (whole_s if is_better else split_s) is not None
        share = _EXPLORED if is_known else _EXPLORED_UNKNOWN
    else:
        whole_s += delayed * own_s
        split_s += delayed_split * own_s
        is_better = split_s < whole_s
        share = _EXPLORED * min(split_s, whole_s) / max(split_s, whole_s)
    explores = draw is not None and draw() < share
    return SplitDecision(is_better is not explores, tokens, times, explores)
