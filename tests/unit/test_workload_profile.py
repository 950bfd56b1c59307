"""The workload-aware profile is valid alone, in Compose and in the Helm chart."""

from pathlib import Path
from typing import Any

import yaml

from picker_fleet.domain.config import Settings, load, overlaid, parse

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def tree(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def differing(one: Settings, other: Settings) -> set[str]:
    return {name for name in Settings.model_fields if getattr(one, name) != getattr(other, name)}


def orders_by_workload(settings: Settings) -> bool:
    queue = settings.fair_request_queue
    return (queue.ordering, queue.flow_capacity, queue.queue_ttl) == ("workload-aware", 200, 60.0)


def test_the_workload_aware_profile_alone_is_valid_and_orders_by_workload() -> None:
    settings = load(DEPLOY / "picker-workload-aware.yaml", {})
    assert orders_by_workload(settings)
    # The profile keeps the default weights, which are the specification's.
    assert settings.workloads == parse({}).workloads


def test_in_compose_the_workload_aware_profile_replaces_the_mounted_configuration() -> None:
    # Compose merges the volumes of both files by their path within the container.
    base = tree(ROOT / "docker-compose.yml")["services"]["picker"]["volumes"]
    over = tree(DEPLOY / "compose" / "workload-aware.yml")["services"]
    (mount,) = over["picker"]["volumes"]
    source, target, mode = mount.split(":")
    assert [each.split(":")[1:] for each in base] == [[target, mode]]
    assert list(over) == ["picker"]
    settings, other = load(ROOT / source, {}), load(DEPLOY / "compose" / "picker.yaml", {})
    assert orders_by_workload(settings)
    assert differing(settings, other) == {"fair_request_queue", "workloads"}


def test_in_the_chart_the_workload_aware_profile_changes_only_the_queue() -> None:
    chart = DEPLOY / "kubernetes" / "chart"
    values = tree(chart / "values.yaml")
    profile = overlaid(
        values, tree(chart / "values-workload-aware.yaml")
    )  # merged as Helm merges, but without discovery
    settings, other = parse(profile["config"]), parse(values["config"])
    assert orders_by_workload(settings)
    assert differing(settings, other) == {"fair_request_queue"}
