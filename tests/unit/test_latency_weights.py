"""What the scorer `latency` weighs: from the configuration to the choice of a replica."""

import pytest
from local_requests import ask

from picker_fleet.config import parse
from picker_fleet.endpoints.snapshot import Snapshot
from picker_fleet.request import Endpoint
from picker_fleet.serve import assemble

STEADY, QUICK = "10.0.0.1:8000", "10.0.0.2:8000"


@pytest.mark.parametrize(
    ("latency", "first"),
    [
        ({}, QUICK),  # 1.0 + 0.5 · 0 against 0.6 + 0.5 · 0.6
        ({"gamma": 0}, QUICK),
        ({"gamma": 2}, STEADY),
        ({"alpha": 0, "beta": 0, "gamma": 1}, STEADY),
        ({"alpha": 5, "gamma": 2}, QUICK),
    ],
)
async def test_the_configured_weights_decide(latency: dict[str, float], first: str) -> None:
    settings = parse(
        {
            "scheduling": {
                "scorers": [{"name": "latency", "weight": 3}],
                **({"latency": latency} if latency else {}),
            }
        }
    )
    parts = assemble(settings, "replica-1")
    parts.endpoints.publish(Snapshot("1", (Endpoint(STEADY), Endpoint(QUICK))))
    for _ in range(10):
        parts.latencies.add(STEADY, 1.0)
    for seconds in (0.0, 1.2) * 5:
        parts.latencies.add(QUICK, seconds)
    choice = parts.chooser.choose(ask("r1"))
    assert choice.candidates.split("=")[0] == first
    scores = parts.chooser.scores()
    assert max(scores, key=lambda address: scores[address]["latency"]) == first
