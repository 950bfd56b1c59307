"""The three ways to put the picker behind Envoy (docs/protocol.md)."""

from typing import Literal, get_args

Mode = Literal["standard", "lean", "headers"]
MODES: tuple[Mode, ...] = get_args(Mode)
