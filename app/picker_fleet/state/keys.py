"""The only place in Python that spells Redis keys. docs/redis-schema.md lists all keys, their types, and how
each is removed; `lua/lib/storage.lua` spells the keys for the scripts."""

BETWEEN = "\x1f"  # separates two names in a key, a field or a row; no name contains this byte (units.py)


def joined(name: str, other: str) -> str:
    return f"{name}{BETWEEN}{other}"


class Keys:
    """Keys of one pool. All carry the hash tag `{POOL}`, so that a Cluster keeps them in one slot."""

    def __init__(self, pool: str) -> None:
        self.prefix = f"epp:{{{pool}}}:"
        self.pool = self.prefix + "pool"
        self.endpoints = self.prefix + "endpoints"
        self.marks = self.prefix + "marks"
        self.outliers = self.prefix + "outliers"
        self.replicas = self.prefix + "replicas"
        self.queue_snapshot = self.prefix + "queue_snapshot"
        self.routes = self.prefix + "routes"
        self.origins = self.prefix + "origins"
        self.tenants = self.prefix + "tenants"
        self.tenant_changes = self.prefix + "tenant_changes"
        self.log = self.prefix + "log"
        self.operator_changes = self.prefix + "operator_changes"
        self.usage_hours = self.prefix + "usage_hours"
        self.metrics = self.prefix + "metrics"  # both a hash and a channel (endpoints/metrics_channel.py)

    @classmethod
    def of(cls, pool: str) -> "Keys":
        return cls(pool)

    def inbox(self, replica: str) -> str:
        return f"{self.prefix}inbox:{replica}"

    def usage(self, hour: int) -> str:
        """The usage counted in an hour, which is numbered in hours since 1970."""
        return f"{self.prefix}usage:{hour}"

    def wake(self, replica: str) -> str:
        return f"{self.prefix}wake:{replica}"
