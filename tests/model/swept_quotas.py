"""The balances of tenants in the model: the local quotas, extended by the scripts' further rules."""

from collections.abc import Iterable, Mapping

from picker_fleet.admission.quotas import Arriving, Charge, Quotas, _Settings, period_of
from picker_fleet.domain.tenants import Price, Tree


def _is_parallel(key: str) -> bool:
    return key.endswith("\x1fparallel")


class SweptQuotas(Quotas):
    """Quotas that also change settings, refund requests that return to the queue, count the cost served at
    each node with settings for its own path, forget balances without effect, recount requests in flight."""

    def put_settings(self, tree: Tree, prices: Mapping[str, Price]) -> None:
        """Change nodes and prices. Balances stay, so a changed limit grants no second burst."""
        self.tree, self._prices = tree, prices

    def restart(self, running: Iterable[str]) -> None:
        """When tenants are switched on or off, forget all charges, also charges of running requests."""
        for request_id, charge in self.charges.items():
            charge.limits.clear()
            charge.started = request_id in running
        for key in list(filter(_is_parallel, self.balances)):
            del self.balances[key]

    def wait(self, r: Arriving) -> None:
        """Register the waiting request r, so that limits that its tenants get meanwhile charge r, too."""
        self.charges.setdefault(r.id, Charge(r.flow, r.model, r.prompt_tokens, r.answer_tokens))

    def quota(self, request_id: str) -> str:
        told = super().quota(request_id)
        charge = self.charges.get(request_id)
        if charge is not None and not self._nodes(charge.flow) and not any(map(_is_parallel, charge.limits)):
            del self.charges[request_id]  # no node on the flow's path has anything to charge
        return told

    def end(self, request_id: str, *, unserved: bool) -> None:
        """End a charge, and remove the request from the counts of its nodes' former limits."""
        charge = self.charges.get(request_id)
        if charge is not None:
            for key in charge.limits - {limit.key for _, limit in self._charged(charge)}:
                if _is_parallel(key) and self.balances.get(key, (0.0,))[0] > 0:
                    self._put(key, self.balances[key][0] - 1)
        super().end(request_id, unserved=unserved)

    def never_suffices(self, request_id: str) -> bool:
        """Whether the first node on the request's path with a short balance does not let the request wait."""
        charge = self.charges[request_id]
        lacks = ((node, self._lack(node, charge)) for node in self._nodes(charge.flow))
        return next(lack.over_burst or node.over_limit != "queue" for node, lack in lacks if lack)

    def count_start(self, request_id: str, cost: float) -> None:
        charge = self.charges.get(request_id)
        if charge is not None and not charge.started:
            self.start(request_id)
            self._count_served(charge.flow, cost)

    def send_back(self, request_id: str, cost: float) -> None:
        """Undo `count_start`: the request waits again. Only nodes with `over_limit: queue` refund."""
        charge = self.charges.get(request_id)
        if charge is not None:
            charge.started = False
            self._count_served(charge.flow, -cost)
            self._refund(request_id, charge, {"queue"})

    def refuse(self, request_id: str) -> None:
        """Undo `arrive` for a refused request: refund the charges made at its arrival."""
        charge = self.charges.pop(request_id, None)
        if charge is not None:
            self._refund(request_id, charge, {"reject", "demote"})

    def _refund(self, request_id: str, charge: Charge, over_limits: set[str]) -> None:
        for node, limit in list(self._charged(charge)):
            if node.over_limit in over_limits:
                self._give_back(node, limit, self._estimate(limit.unit, charge))
                charge.limits.remove(limit.key)
        if self._nodes(charge.flow):
            self._log("refunded", request_id)

    def count_running(self, requests: Iterable[Arriving]) -> None:
        """Charge running requests to limits on requests in flight that are newer than the requests' start."""
        for r in requests:
            charge = self.charges.get(r.id) or Charge(r.flow, r.model, 0.0, 0.0, started=True)
            uncharged = [limit for node in self._nodes(r.flow) for limit in self._uncharged(node, charge)]
            bounds = [limit for limit in uncharged if limit.unit == "parallel"]
            for limit in bounds:
                self._take(limit, 1)
                charge.limits.add(limit.key)
            if bounds:
                self.charges[r.id] = charge
                self._log("charged", r.id)

    def _nodes(self, flow: str) -> list[_Settings]:
        """The nodes of a flow's path that have limits or count the cost served, from the top."""
        found = [(path, self.tree.node(path)) for path in self.tree.paths(flow)]
        nodes = [(self._settings(path, node), node.path) for path, node in found if node is not None]
        return [node for node, configured in nodes if node.limits or configured == node.path]

    def _count_served(self, flow: str, cost: float) -> None:
        for path in self.tree.paths(flow):
            if self._counts_served(path):
                key = f"{path}\x1fserved"
                self._put(key, max(self.balances.get(key, (0.0,))[0] + cost, 0.0))

    def _counts_served(self, path: str) -> bool:
        node = self.tree.node(path)
        return node is not None and node.path == path

    def drop_idle(self) -> None:
        """Forget balances without effect, as the sweep does: balances of removed nodes, and of unused limits.
        The balance of a limit is kept for the limit's period after its last change."""
        now_ms = self._now_ms() // 1
        for key, balance in list(self.balances.items()):
            path, _, kind = key.rpartition("\x1f")
            unit, _, per = kind.partition(":")
            if unit == "parallel" and balance[0] > 0:
                continue
            if per.isdecimal() and now_ms - balance[1] < int(per):
                continue
            if unit == "budget" and balance[0] == period_of(per, now_ms)[0]:
                continue
            node = self.tree.node(path)
            settings = self._settings(path, node) if node is not None else None
            limit = next((each for each in settings.limits if each.key == key), None) if settings else None
            is_served = kind == "served" and self._counts_served(path)
            if not (is_served or (limit and self._taken(limit) > 0)):
                del self.balances[key]
