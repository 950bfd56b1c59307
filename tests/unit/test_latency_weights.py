"""What the scorer `latency` weighs: from the configuration to the choice of a replica."""

import pytest
from local_requests import ask

from picker_fleet.config import parse
from picker_fleet.endpoints.snapshot import Snapshot
from picker_fleet.errors import ConfigError
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


def test_default_weights_are_those_of_the_specification() -> None:
    assert parse({}).scheduling.latency.model_dump() == {"alpha": 1.0, "beta": 0.5, "gamma": 0.5}


@pytest.mark.parametrize(
    ("latency", "says"),
    [
        ({"alpha": -1}, "scheduling.latency.alpha: Input should be greater than or equal to 0 (got '-1')"),
        ({"beta": "high"}, "scheduling.latency.beta: "),
        ({"gamma": float("inf")}, "scheduling.latency.gamma: "),
        ({"delta": 1}, "scheduling.latency.delta: unknown key; valid here: alpha, beta, gamma"),
        (
            {"alpha": 0, "beta": 0, "gamma": 0},
            "scheduling.latency: one of alpha, beta and gamma must be above 0",
        ),
    ],
)
def test_impossible_weights_are_named(latency: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"scheduling": {"latency": latency}})
    assert says in str(caught.value)
