"""The balances of tenants in the model: the local quotas, extended by the scripts' further rules."""

from collections.abc import Mapping

from picker_fleet.admission.quotas import Arriving, Charge, Quotas, _Settings, period_of
from picker_fleet.domain.tenants import Price, Tree


class SweptQuotas(Quotas):
    """Also changes settings, refunds requests that return to the queue, counts the cost served at each node
    with settings for its own path, forgets balances without effect, and counts requests in flight again."""

    def put_settings(self, tree: Tree, prices: Mapping[str, Price]) -> None:
        """Change nodes and prices. Balances stay, so a changed limit grants no second burst."""
        self.tree, self._prices = tree, prices

    def counts(self, request_id: str) -> bool:
        charge = self.charges.get(request_id)
        return charge is not None and (not charge.arrival or bool(self._nodes(charge.flow)))

    def arrival_limits(self, flow: str) -> list[str]:
        nodes = (node for node in self._nodes(flow) if node.over_limit != "queue")
        return [limit.key for node in nodes for limit in node.limits]

    def wait(self, r: Arriving) -> None:
        """Let limits that its tenants get while request r waits charge r, too."""
        self.charges.setdefault(r.id, Charge(r.flow, r.model, r.prompt_tokens, r.answer_tokens))

    def quota(self, request_id: str) -> str:
        charge = self.charges.get(request_id)
        if charge is not None and not (charge.arrival or charge.grant):
            del self.charges[request_id]  # no limit can charge a placed request
        return super().quota(request_id)

    def give_arrival_back(self, request_id: str) -> None:
        """Refund what a waiting request was charged at its arrival."""
        charge = self.charges[request_id]
        if charge.arrival:
            self._take_all(charge, "arrival", -1)
            charge.arrival = False
            self._log("refunded", request_id)

    def arrive_again(self, request_id: str) -> bool:
        """Charge a waiting request's arrival, or forget its charge if a limit does not suffice."""
        charge = self.charges[request_id]
        charged = [node for node in self._nodes(charge.flow) if node.over_limit != "queue"]
        if any(self._lack(node, charge) for node in charged if any(self._limits_for(node, charge))):
            del self.charges[request_id]
            return False
        self._take_all(charge, "arrival", 1)
        charge.arrival = True
        self._log("charged", request_id)
        return True

    def never_suffices(self, request_id: str) -> bool:
        """Whether the first node without enough balance for a waiting request can never grant it."""
        charge = self.charges[request_id]
        lacks = (self._lack(node, charge) for node in self._nodes(charge.flow) if node.over_limit == "queue")
        return any(lack.over_burst for lack in [next(filter(None, lacks))])

    def count_start(self, request_id: str, cost: float) -> None:
        charge = self.charges.get(request_id)
        if charge is not None and not charge.grant:
            self.start(request_id)
            self._count_served(charge.flow, cost)

    def send_back(self, request_id: str, cost: float) -> None:
        """Undo `count_start`: the request waits again."""
        charge = self.charges.get(request_id)
        if charge is not None and charge.grant and self._nodes(charge.flow):
            self._take_all(charge, "grant", -1)
            charge.grant = False
            self._count_served(charge.flow, -cost)
            self._log("refunded", request_id)

    def refuse(self, request_id: str) -> None:
        """Undo `arrive`."""
        if request_id in self.charges:
            self.give_arrival_back(request_id)
            del self.charges[request_id]

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

    def recount(self) -> None:
        """Count the requests in flight again, since a node may have got a bound while its requests ran."""
        for key in [key for key in self.balances if key.endswith("\x1fparallel")]:
            del self.balances[key]
        for charge in self.charges.values():
            for _, limit in self._charged(charge):
                if limit.unit == "parallel":
                    self._take(limit, 1)
