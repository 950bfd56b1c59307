"""The metrics page as tests read it."""

from prometheus_client.parser import text_string_to_metric_families

from picker_fleet.telemetry.metrics import Metrics, MetricsPage


def page_of(metrics: Metrics) -> bytes:
    """The page's text."""
    return b"".join(MetricsPage([metrics]).pieces())


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Every sample of the page by (name, label=value…)."""
    return samples_of(page_of(metrics).decode())


def samples_of(page: str) -> dict[tuple[str, ...], float]:
    """As `samples`, of a page as it is served."""
    found = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    return {(name, *sorted(f"{key}={of}" for key, of in labels.items() if of)): value
            for name, labels, value, *_ in found}  # fmt: skip
