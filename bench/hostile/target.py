"""What attackers and honest clients know of the fleet."""

from typing import NamedTuple

MODEL = "llama"  # of the honest model servers
TRAP = "trap"  # of the hostile ones
HONEST, ATTACKER = "an-honest-key-1f0c9a", "an-attackers-key-77be02"


class Target(NamedTuple):
    """Addresses, host:port: Envoy's listener, the replicas' gRPC and admin ports."""

    envoy: str
    grpc: tuple[str, ...]
    admin: tuple[str, ...]
