"""Parsers of command-line arguments: values for the parameter `type` of argparse."""

import argparse
from collections.abc import Callable
from contextlib import suppress


def whole_number(least: int, most: int = 100) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
        return int(text)

    return parse


port = whole_number(0, 65535)


def decimal(what: str, most: float, *, zero: bool = False) -> Callable[[str], float]:
    """A parser of numbers above 0 (from 0 if `zero`) up to `most`; its errors call the number `what`."""
    valid = f"from 0 to {most:g}" if zero else f"above 0, up to {most:g}"

    def parse(text: str) -> float:
        with suppress(ValueError):
            value = float(text)
            if 0 < value <= most or (zero and value == 0):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is no {what} {valid}")

    return parse


milliseconds = decimal("number of milliseconds", 1e9, zero=True)
