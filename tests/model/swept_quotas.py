"""The balances of tenants in the model: as in an outage, and what the sweep and new limits do in Redis."""

from picker_fleet.admission.quotas import Quotas


class SweptQuotas(Quotas):
    """Forgets balances without effect, and counts requests in flight again."""

    def drop_idle(self) -> None:
        """Forget balances without effect, as the sweep does: of nodes that are gone, and of limits of which
        nothing is taken. The balance of a limit is kept for the limit's period after its last change."""
        now_ms = self._now_ms() // 1
        for key, balance in list(self.balances.items()):
            path, _, kind = key.rpartition("\x1f")
            per = kind.partition(":")[2]
            if per.isdecimal() and now_ms - balance[1] < int(per):
                continue
            node = self.tree.node(path)
            settings = self._settings(path, node) if node is not None else None
            limit = next((each for each in settings.limits if each.key == key), None) if settings else None
            is_kept = settings is not None and (key == settings.served or (limit and self._taken(limit) > 0))
            if not is_kept:
                del self.balances[key]

    def recount(self) -> None:
        """Count the requests in flight again: a node may have got a bound while its requests ran."""
        for key in [key for key in self.balances if key.endswith("\x1fparallel")]:
            del self.balances[key]
        for charge in self.charges.values():
            for _, limit in self._charged(charge):
                if limit.unit == "parallel":
                    self._take(limit, 1)
