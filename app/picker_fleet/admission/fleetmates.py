"""The live replicas of a fleet, as the last of them was heard of, and each one's part of what is free."""

from collections.abc import Mapping
from typing import Any

from picker_fleet.admission.purse import share
from picker_fleet.state.store import Pulse


class Fleetmates:
    """`live` are their ids, in order, as they were while the shared state could be had; this replica's own,
    `replica`, is among them."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self.live: tuple[str, ...] = ()
        self._about: Mapping[str, Mapping[str, Any]] = {}  # what the live replicas say of themselves
        self._addresses: dict[str, str] = {}

    def heard(self, about: Mapping[str, Mapping[str, Any]], *, shared: bool) -> None:
        """Who is live, and what each says of itself; who counts changes only while the state is `shared`."""
        self._about = about
        if shared:
            self.live = tuple(sorted(about))
        for name, said in about.items():
            if name != self._replica and said.get("grpc"):
                self._addresses[name] = str(said["grpc"])

    def others(self) -> Mapping[str, str]:
        """Where each of the others is asked for places (host:port), by its id."""
        return {name: self._addresses[name] for name in self.live if name in self._addresses}

    def all_back(self) -> bool:
        """Whether everyone who was live says that its part of the state is in the shared one."""
        return all(name in self._about and not self._about[name].get("degraded") for name in self.live)

    def count(self, pulse: Pulse) -> int:
        """How many replicas the bound is shared by."""
        return max(len(self.live), pulse.live, 1)

    def part(self, pulse: Pulse, *, whole: bool) -> float:
        """This replica's part of what was free at `pulse`; `whole` as in `purse.share`."""
        live = self.count(pulse)
        rank = self.live.index(self._replica) if self._replica in self.live else live
        return share(pulse.upper - pulse.stock, live=live, rank=rank, whole=whole)
