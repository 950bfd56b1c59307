"""What `picker up` was asked for."""

from dataclasses import dataclass
from pathlib import Path

from picker_fleet.header_trust import FAIRNESS_ID, OBJECTIVE
from picker_tools.local_fleet.modes import Mode

# Whoever runs a local fleet is tenant and operator in one. The workload is anyone's to name.
TRUSTED_HEADERS = (FAIRNESS_ID[0], OBJECTIVE[0])


@dataclass(frozen=True, slots=True)
class SimOptions:
    """Passed on to each simulator; None leaves its own default."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    max_num_seqs: int | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Ports are on the loopback; 0 is any free one. `redis` None embeds a Valkey."""

    replicas: int
    endpoints: int
    mode: Mode
    redis: str | None
    port: int
    admin_port: int
    config: Path | None
    state_file: Path | None
    restart: bool
    debug_headers: bool
    sim: SimOptions
