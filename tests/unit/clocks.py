"""Clocks that tests set."""

from dataclasses import dataclass


@dataclass
class Clock:
    """A clock in seconds that only the test moves."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s
