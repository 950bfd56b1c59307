"""Reads the metrics page for tests."""

from prometheus_client.parser import text_string_to_metric_families

from picker_fleet.admin.documents import MetricsText
from picker_fleet.telemetry.metrics import Metrics


def page_of(metrics: Metrics) -> bytes:
    """The metrics page that the object `metrics` renders."""
    return b"".join(MetricsText([metrics]).pieces())


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """All samples of the metrics page, by (name, label=value…)."""
    return samples_of(page_of(metrics).decode())


def samples_of(page: str) -> dict[tuple[str, ...], float]:
    """All samples of the text of a metrics page, by (name, label=value…) without empty labels."""
    found = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    return {(name, *sorted(f"{key}={of}" for key, of in labels.items() if of)): value
            for name, labels, value, *_ in found}  # fmt: skip
