"""The only place in Python that spells a Redis key. `lua/lib/storage.lua` has the whole table, with types
and who removes what; docs/redis-schema.md is the same list for operators."""

from dataclasses import dataclass

BETWEEN = "\x1f"  # joins two names in a key, a field or a row: no name can hold it (units.py)


def joined(name: str, other: str) -> str:
    return f"{name}{BETWEEN}{other}"


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of one pool. All carry the hash tag `{POOL}`, so that a Cluster keeps them in one slot."""

    prefix: str

    @classmethod
    def of(cls, pool: str) -> "Keys":
        return cls(prefix=f"epp:{{{pool}}}:")

    @property
    def pool(self) -> str:
        return self.prefix + "pool"

    @property
    def endpoints(self) -> str:
        return self.prefix + "endpoints"

    @property
    def marks(self) -> str:
        return self.prefix + "marks"

    @property
    def replicas(self) -> str:
        return self.prefix + "replicas"

    @property
    def queue_snapshot(self) -> str:
        return self.prefix + "lanes"

    @property
    def routes(self) -> str:
        return self.prefix + "routes"

    @property
    def log(self) -> str:
        return self.prefix + "log"

    @property
    def metrics(self) -> str:
        """A hash, and the channel of the same name (endpoints/metrics_channel.py)."""
        return self.prefix + "metrics"

    def inbox(self, replica: str) -> str:
        return f"{self.prefix}inbox:{replica}"

    def wake(self, replica: str) -> str:
        return f"{self.prefix}wake:{replica}"
