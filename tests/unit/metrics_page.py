"""The metrics page as tests read it."""

from prometheus_client.parser import text_string_to_metric_families

from app.telemetry.metrics import Metrics


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Every sample of the page by (name, label=value…)."""
    page = metrics.page().decode()
    return {
        (
            sample.name,
            *sorted(f"{key}={value}" for key, value in sample.labels.items() if value),
        ): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
