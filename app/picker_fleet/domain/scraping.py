"""The section `scraping` of the settings: the engines and the metrics pages of model servers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from picker_fleet.domain.engines import ENGINES, Aggregation, Engine, known_engine, series_of
from picker_fleet.domain.sections import Port, Section, url_path
from picker_fleet.domain.units import AUTO, AutoDuration, FilePath

_MEANINGS = ("waiting", "running", "kv_utilisation", "preemptions", "adapters", "awake")
_PATHS = ("path", "probe_path")
_ENGINE_LABELS = ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type")
Scheme = Literal["http", "https"]


class Scraping(Section):
    """Scraping of metrics pages. `interval: auto` scrapes as often as the metrics are used, within 1 % of the
    replica's and of the endpoint's time; `stale_after: auto` is 3 intervals."""

    interval: AutoDuration = Field(None, ge=0.01)
    stale_after: AutoDuration = Field(None, gt=0)
    engine: str = AUTO
    engine_label: str = _ENGINE_LABELS[0]  # the endpoint label that has the engine's name
    series: Mapping[str, str] = Field(default={})  # metric -> series; overrides the engine's series
    aggregation: Mapping[str, Aggregation | Literal["sum"]] = Field(default={})  # label -> how to join series

    # How to fetch metrics pages; `port` must be set if the pages are not on the port of requests.
    port: Port | None = None
    scheme: Scheme = "http"
    probe_scheme: Scheme | None = None  # for probes (at the port of requests); null means `scheme`
    ca: FilePath | None = None  # CA file for certificates of `https` pages; null: accept any certificate
    token_file: FilePath | None = None  # bearer token sent with each scrape

    @model_validator(mode="after")
    def _fresh_between_scrapes(self) -> Self:
        if self.stale_after and self.interval and self.stale_after < self.interval:
            raise ValueError("stale_after must be at least interval, or every figure counts as unknown")
        return self

    @model_validator(mode="after")
    def _of_a_known_engine(self) -> Self:
        if self.engine != AUTO and known_engine(self.engine) is None and not self.series:
            raise ValueError(
                f"engine {self.engine!r} is not one of {AUTO}, {', '.join(ENGINES)}, and no series are named"
            )
        for meaning, text in self.series.items():
            if meaning in _PATHS:
                url_path(text)
            elif meaning in _MEANINGS:
                series_of(text)
            else:
                raise ValueError(f"{meaning!r} is not one of {', '.join((*_MEANINGS, *_PATHS))}")
        return self

    def engine_named(self, labels: Mapping[str, str]) -> str:
        """The engine name in an endpoint's `labels`; '' if no label names an engine."""
        return next((labels[key] for key in (self.engine_label, *_ENGINE_LABELS) if key in labels), "")

    def engines(self, named: str = "") -> tuple[Engine, ...]:
        """The candidate engines of an endpoint whose labels name the engine `named`. Among several candidate
        engines the endpoint's metrics page decides."""
        labelled, configured = known_engine(named), known_engine(self.engine)
        if labelled is not None and labelled is not configured:
            # The labels and the configuration name different engines: the configured `series` do not apply.
            return (self._own(labelled) if self.engine == AUTO else labelled,)
        if self.engine != AUTO:
            return (self._own(configured or Engine(self.engine)),)
        own = (self._own(Engine("series")),) if self.series else ()
        return (*map(self._own, ENGINES.values()), *own)

    def _own(self, engine: Engine) -> Engine:
        """`engine` with the configured series, paths and aggregation. With `engine: auto`, the engine's own
        series follow the configured ones."""
        given: dict[str, Any] = {
            key: text if key in _PATHS else (text, *(getattr(engine, key) if self.engine == AUTO else ()))
            for key, text in self.series.items()
        }
        aggregation = {**engine.aggregation, **self.aggregation}
        merged = {label: how for label, how in aggregation.items() if how != "sum"}
        return replace(engine, aggregation=merged, **given)
