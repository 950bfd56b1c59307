"""What came of one request, as its client saw it."""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """How a request ended for its client."""

    SERVED = "served"  # a whole answer
    REFUSED = "refused"  # 503 or 429 of the picker, with its reason
    FAILED = "failed"  # anything else: an error, half an answer, none in time
    LEFT = "left"  # the run was interrupted and the client hung up


@dataclass(frozen=True, slots=True)
class Answer:
    """Times are seconds; `due_s` and `sent_s` since the load began, the others since the request was sent.

    `due_s` is when it was to be sent. `head_s` is the answer's head, `first_s` the first byte of its body
    (None: it did not come). `served_by` is the endpoint's own word for who it is. `tokens` is what the
    answer's usage tells, `asked_tokens` what was asked for. `turn` counts within a conversation, from 0.
    """

    source: str
    number: int
    turn: int
    streamed: bool
    prompt_bytes: int
    asked_tokens: int
    due_s: float
    sent_s: float
    head_s: float | None
    first_s: float | None
    last_s: float
    status: int
    reason: str
    retry_after_s: float | None
    served_by: str
    tokens: int | None
    answers: int
    fault: str
    left: bool = False

    @property
    def kind(self) -> Kind:
        if self.left:
            return Kind.LEFT
        if self.fault:
            return Kind.FAILED
        if self.status == 200:
            return Kind.SERVED
        return Kind.REFUSED if self.status in (429, 503) else Kind.FAILED

    @property
    def what(self) -> str:
        """How it ended, in a word or two, to count by."""
        if self.kind is Kind.SERVED or self.left:
            return self.kind.value
        if self.fault:
            return self.fault
        return f"{self.status} {self.reason or 'without a reason'}"

    def __str__(self) -> str:
        turn = f" turn {self.turn}" if self.turn else ""
        return (
            f"{self.source} #{self.number}{turn}: sent at {self.sent_s:.3f} s, {self.what} after "
            f"{self.last_s:.3f} s"
        )
