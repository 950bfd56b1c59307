"""Converts the plugins of an `EndpointPickerConfig` that read metrics pages; import_config.py calls it.

Sources: sigs.k8s.io/gateway-api-inference-extension, pkg/epp/framework/plugins/datalayer.
"""

from collections.abc import Mapping
from typing import Any

from picker_fleet.domain.engines import known_engine, series_of
from picker_fleet.domain.errors import ConfigError
from picker_kubernetes.import_result import Imported, mappings
from picker_kubernetes.import_stages import Plugins

_PAGES, _FIGURES = "metrics-data-source", "core-metrics-extractor"
# Plugin type -> its parameters that are imported or have a remark of their own.
PARAMETERS: Mapping[str, tuple[str, ...]] = {
    _PAGES: ("scheme", "path", "insecureSkipVerify"),
    _FIGURES: ("engineLabelKey", "defaultEngine", "engineConfigs"),
}
# Key of an engine in `engineConfigs` -> key of `scraping.series`.
_SERIES: Mapping[str, str] = {
    "queuedRequestsSpec": "waiting",
    "runningRequestsSpec": "running",
    "kvUsageSpec": "kv_utilisation",
    "loraSpec": "adapters",
}


def add(plugins: Plugins, result: Imported) -> None:
    """Add the section `scraping`, if metrics pages differ from the defaults, to `result`."""
    scraping: dict[str, Any] = {}
    series: dict[str, Any] = {}
    for name, (kind, parameters) in plugins.items():
        if kind == _PAGES:
            if (scheme := parameters.get("scheme")) not in (None, "http"):
                scraping["scheme"] = scheme
            if (path := parameters.get("path")) not in (None, "/metrics"):
                series["path"] = path
            if parameters.get("insecureSkipVerify") is False:
                result.remarks.append(f"plugins: insecureSkipVerify of {name}: set scraping.ca")
        elif kind == _FIGURES:
            if label := parameters.get("engineLabelKey"):
                scraping["engine_label"] = label
            series |= _series(name, parameters, result)
    if series:
        scraping["series"] = series
    if scraping:
        result.section("scraping").update(scraping)


def _series(name: str, parameters: Mapping[str, Any], result: Imported) -> dict[str, str]:
    """The series of the default engine, or else of the first engine, that the plugin `name` configures.
    Engines that this picker knows need no series."""
    where = f"plugins: {name}.engineConfigs"
    engines = {str(each.get("name")): each for each in mappings(parameters, "engineConfigs", where)}
    default = str(parameters.get("defaultEngine") or "vllm")
    if default not in engines and known_engine(default) is None:
        raise ConfigError(f"plugins: {name}.defaultEngine: no engine is named {default[:60]!r}")
    chosen = default if default in engines else next(iter(engines), "")
    if others := sorted(engines.keys() - {chosen}):
        told = f"scraping.series has the series of one engine, {chosen}"
        result.remarks.append(f"{where}: not imported: {', '.join(others)}; {told}")
    specs = engines.get(chosen, {})
    if rest := sorted(map(str, specs.keys() - {"name", *_SERIES})):
        result.remarks.append(f"{where}: keys of {chosen} ({', '.join(rest)}) have no counterpart")
    found = {_SERIES[key]: str(specs[key]) for key in _SERIES if specs.get(key)}
    for key, text in found.items():
        try:
            series_of(text)
        except ValueError as fault:
            raise ConfigError(f"{where}: {key} of {chosen}: {fault}") from None
    return found
