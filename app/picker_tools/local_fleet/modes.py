"""The three ways to put the picker behind Envoy (ENVOY, "Three modes")."""

from typing import Literal, get_args

Mode = Literal["standard", "lean", "headers"]
MODES: tuple[Mode, ...] = get_args(Mode)
