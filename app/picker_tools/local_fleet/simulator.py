"""A simulated model server of the local fleet: `picker sim` as a child."""

import re
from collections.abc import Sequence

from picker_tools.local_fleet.child import Child
from picker_tools.local_fleet.options import SimOptions
from picker_tools.local_fleet.part import READY_S, picker_command

_LISTENING = re.compile(r"listening on http://(\S+:\d+)")


class Simulator:
    """Simulator `number`, which serves `models`: the first as its base model, the rest as adapters."""

    def __init__(self, number: int, options: SimOptions, models: Sequence[str]) -> None:
        self.name = f"endpoint-{number}"
        self._options = options
        self._models = models
        self._address = ""

    @property
    def address(self) -> str:
        """`ip:port`; '' before it was ready."""
        return self._address

    def command(self) -> list[str]:
        port = self._address.rpartition(":")[2] or "0"
        given = {
            "--ttft": self._options.ttft_ms,
            "--itl": self._options.itl_ms,
            "--max-num-seqs": self._options.max_num_seqs,
            "--seed": self._options.seed,
            "--model": self._models[0] if self._models else None,
            "--loras": ",".join(self._models[1:]) or None,
        }
        flags = [word for key, value in given.items() if value is not None for word in (key, f"{value}")]
        return picker_command("sim", "--port", port, *flags)

    async def ready(self, child: Child) -> str:
        async def listening() -> str | None:
            for line in child.lines():
                if match := _LISTENING.search(line):
                    return match[1]
            return None

        self._address = await child.until(listening, within_s=READY_S, what="its address")
        return f"http://{self._address}"
