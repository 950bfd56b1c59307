"""Everything that happens to a cluster, one after the other, under load: no client sees an error."""

from collections.abc import Callable

from api_server import ApiServer
from changes import change_everything, started
from seat import Seat

AWAY_S = 30.0  # how long the API server is gone


async def test_no_client_sees_an_error_while_a_cluster_changes_in_every_way(
    empty: ApiServer, seat: Seat, record_property: Callable[[str, object], None]
) -> None:
    await started(empty, seat)
    await seat.everywhere(lambda found: list(found.values()).count("ready") == 3, "three pods are ready")
    found = await change_everything(empty, seat, AWAY_S)
    for what, seconds in found.seconds.items():
        record_property(what, f"{seconds:.2f} s")
        print(f"{what}: {seconds:.2f} s")  # shown by -s
    assert found.errors == []
    for picker in seat.pickers:
        assert "expired; listing again" in picker.log.read_text()
        assert (await picker.admin.get("/readyz")).status_code == 200
