"""Converts an `EndpointPickerConfig` of llm-d's router, for `picker import-config` and `serve --config-file`.

A key with a counterpart becomes a key of Picker Fleet's configuration; a remark names each key without a
counterpart. The command also converts tenants' limits (import_tenants.py). docs/migration.md has the mapping.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from picker_fleet.domain.bands import NAMED
from picker_fleet.domain.config import YamlFault, parse, read_yaml
from picker_fleet.domain.errors import ConfigError
from picker_fleet.domain.sections import MOST_BAND_BYTES, MOST_LIMIT
from picker_kubernetes import import_metrics, import_stages, import_tenants
from picker_kubernetes.import_result import Imported, listed, mapping, mappings
from picker_kubernetes.import_stages import Plugins

KIND = "EndpointPickerConfig"

SCORERS: Mapping[str, str] = {
    "queue-scorer": "queue-depth",
    "queue-depth-scorer": "queue-depth",
    "kv-cache-utilization-scorer": "kv-cache",
    "running-requests-size-scorer": "running-requests",
    "load-aware-scorer": "queue-depth",
    "active-request-scorer": "in-flight",
    "token-load-scorer": "in-flight",
    "lora-affinity-scorer": "lora-affinity",
    "prefix-cache-scorer": "prefix-affinity",
    "precise-prefix-cache-scorer": "prefix-affinity",
    "prefix-cache-affinity-filter": "prefix-affinity",
    "session-affinity-scorer": "session-affinity",
    "latency-scorer": "latency",
    "predicted-latency-scorer": "latency",
    "pd-slo-pair-optimizer": "slo-headroom",
    "pd-slo-optimizer": "slo-headroom",
    "random-picker": "random",
}
# Plugin type -> those of its parameters that are imported or have a remark of their own.
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "max-score-picker": ("maxNumOfEndpoints",),
    "random-picker": ("maxNumOfEndpoints",),
    "weighted-random-picker": ("maxNumOfEndpoints",),
    "label-selector-filter": ("matchLabels", "matchExpressions"),
    "by-label-selector": ("matchLabels", "matchExpressions"),
    "disagg-profile-handler": (
        *("profiles", "decodeProfile", "prefillProfile", "encodeProfile", "deciders"),
        *("deciderPluginName", "prefillDeciderPluginName", "encodeDeciderPluginName"),
    ),
    "pd-profile-handler": ("decodeProfile", "prefillProfile", "deciderPluginName", "threshold"),
    "pd-slo-profile-handler": ("decodeProfile", "prefillProfile"),
    "prefix-based-pd-decider": ("nonCachedTokens",),
    "disagg-headers-handler": ("prefillProfile", "encodeProfile"),
    "prefill-header-handler": ("prefillProfile",),
    "concurrency-detector": ("maxConcurrency", "maxTokenConcurrency", "concurrencyMode", "headroom"),
    "utilization-detector": ("queueDepthThreshold", "kvCacheUtilThreshold"),
    **import_metrics.PARAMETERS,
}
_PICKERS = ("max-score-picker", "random-picker", "weighted-random-picker")
_DETECTOR = "utilization-detector"  # the router's default saturation detector
_LABEL_FILTERS = ("label-selector-filter", "by-label-selector")
_ORDERINGS: Mapping[str, str] = {
    "fcfs-ordering-policy": "fcfs",
    "edf-ordering-policy": "edf",
    "slo-deadline-ordering-policy": "edf",
}
_FAIRNESS: Mapping[str, str] = {
    "round-robin-fairness-policy": "round-robin",
    "global-strict-fairness-policy": "none",
}
# Plugin types that other code imports, or whose work this picker always does (docs/migration.md).
BUILT_IN: frozenset[str] = frozenset({
    "single-profile-handler", "max-score-picker", "request-attribute-reporter",
    "metrics-data-source", "core-metrics-extractor", "approx-prefix-cache-producer", "inflight-load-producer",
    "openai-parser", "anthropic-parser", "vllmhttp-parser",
    *import_stages.HANDLERS, "always-disagg-pd-decider", "prefix-based-pd-decider",
    "always-disagg-multimodal-decider", "encode-filter", "prefill-filter", "decode-filter",
    "disagg-headers-handler", "prefill-header-handler",
    *_LABEL_FILTERS, *_ORDERINGS, *_FAIRNESS, _DETECTOR, "concurrency-detector",
    "header-based-testing-filter", "destination-endpoint-served-verifier",
})  # fmt: skip
# Plugin type without a counterpart -> what a user can use instead.
_INSTEAD: Mapping[str, str] = {
    "predicted-latency-producer": "the scorer latency measures times itself",
    **dict.fromkeys(("latency-slo-admitter", "slo-headroom-tier-filter"), "add the scorer slo-headroom"),
    **dict.fromkeys(("token-producer", "precise-prefix-cache-producer"), "set scheduling.kv_events_port"),
    "no-hit-lru-scorer": "add the scorer in-flight",
    "context-length-aware": "give each range of lengths a pool of its own (pools)",
    "program-aware-fairness": "set fair_request_queue.fairness weighted-fair",
}
# Section of the file (`[]` marks a list) -> its keys that are imported or have a remark of their own.
_KEYS: Mapping[str, frozenset[str]] = {
    where: frozenset(keys.split())
    for where, keys in {
        "": (
            "apiVersion kind metadata featureGates plugins schedulingProfiles dataLayer data "
            "saturationDetector flowControl requestHandler parser profileHandler"
        ),
        **dict.fromkeys(("plugins[]", "profileHandler"), "name type parameters"),
        "schedulingProfiles[]": "name plugins",
        "schedulingProfiles[].plugins[]": "pluginRef weight",
        "dataLayer": "injectDefaults sources",
        "dataLayer.sources[]": "pluginRef extractors",
        "dataLayer.sources[].extractors[]": "pluginRef",
        "data": "injectDefaults sources",
        "data.sources[]": "pluginRef extractors",
        "data.sources[].extractors[]": "pluginRef",
        "requestHandler": "parsers",
        "requestHandler.parsers[]": "pluginRef",
        "parser": "pluginRef",
        "saturationDetector": "pluginRef queueDepthThreshold kvCacheUtilThreshold",
        "flowControl": "maxRequests maxBytes defaultRequestTTL noEndpointRequestTTL enableEviction "
        "priorityBands defaultPriorityBand saturationDetector",
        "flowControl.saturationDetector": "pluginRef",
        "flowControl.priorityBands[]": "priority maxRequests maxBytes orderingPolicyRef fairnessPolicyRef",
        "flowControl.defaultPriorityBand": "maxRequests maxBytes orderingPolicyRef fairnessPolicyRef",
    }.items()
}
_MOST: Mapping[str, int] = {"maxRequests": 100_000, "maxBytes": MOST_BAND_BYTES}
# The units of Kubernetes quantities (_UNITS), and of Go durations (_SECONDS).
_UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3} | {
    f"{prefix}{binary}": float(2 ** (10 * power) if binary else 1000**power)
    for power, prefix in enumerate("KMGTPE", start=1)
    for binary in ("", "i")
}
_QUANTITY = re.compile(r"\+?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3}|[numkKMGTPE]i?|)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NAMES_KIND = re.compile(rf"kind[\"']?\s*:\s*[\"']?{KIND}\b")  # matches YAML and JSON
_DURATION = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|\u00b5s|ms|s|m|h)")


def is_foreign(tree: object) -> bool:
    """Whether `tree` is an EndpointPickerConfig."""
    return isinstance(tree, Mapping) and tree.get("kind") == KIND


def imported(tree: Mapping[str, Any]) -> Imported:
    """Convert the `EndpointPickerConfig` in `tree`.

    Raises:
        ConfigError: `tree` is malformed; the error's message names the key.
    """
    if not is_foreign(tree):
        raise ConfigError(f"kind must be {KIND} (got {str(tree.get('kind'))[:60]!r})")
    result = Imported()
    plugins = _plugins(tree)
    _scheduling(tree, plugins, result)
    _saturation(tree, plugins, result)
    _flow_control(tree, plugins, result)
    import_metrics.add(plugins, result)
    for gate in map(str, listed(tree, "featureGates")):
        name, _, value = gate.partition("=")
        if name == "flowControl" and value in ("", "true", "false"):
            result.section("request_queue_controller")["enabled"] = value != "false"
        else:
            result.remarks.append(f"featureGates: {gate} has no counterpart")
    handler = mapping(tree.get("requestHandler"), "requestHandler")
    parsers = mappings(handler, "parsers", "requestHandler.parsers")
    for parser in (*parsers, *([mapping(tree["parser"], "parser")] if tree.get("parser") else ())):
        named = str(parser.get("pluginRef"))
        kind = plugins.get(named, (named, {}))[0]
        if kind not in BUILT_IN and named not in plugins:
            result.remarks.append(f"requestHandler.parsers: {kind} has no counterpart")
    for name, (kind, parameters) in plugins.items():
        where = f"plugins: {name} (type {kind})"
        if kind not in SCORERS and kind not in BUILT_IN and kind not in _PICKERS:
            instead = f"; {_INSTEAD[kind]}" if kind in _INSTEAD else ""
            result.remarks.append(f"{where} has no counterpart{instead}")
            continue
        if kind == "weighted-random-picker":
            result.remarks.append(f"{where}: this picker picks the best endpoint, not a random one")
        if told := sorted(map(str, parameters.keys() - set(_PARAMETERS.get(kind, ())))):
            result.remarks.append(f"plugins: parameters of {name} ({', '.join(told)}) have no counterpart")
    _name_rest(tree, "", result)
    parse(result.tree)
    return result


def _name_rest(section: Mapping[str, Any], where: str, result: Imported) -> None:
    """Add a remark for each key of `section`, or of a section within `section`, that is not imported."""
    path = where.replace("[]", "") + ("." if where else "")
    for key in sorted(map(str, section.keys() - _KEYS[where])):
        result.remarks.append(f"{path}{key} has no counterpart")
    for key, value in section.items():
        inner = f"{where}.{key}" if where else str(key)
        if inner in _KEYS:
            _name_rest(mapping(value, f"{path}{key}"), inner, result)
        elif f"{inner}[]" in _KEYS:
            for each in mappings(section, key, f"{path}{key}"):
                _name_rest(each, f"{inner}[]", result)


def _plugins(tree: Mapping[str, Any]) -> Plugins:
    """The plugins by name, including the section `profileHandler`, which some of llm-d's guides use."""
    found: dict[str, tuple[str, Mapping[str, Any]]] = {}
    handler = [tree["profileHandler"]] if "profileHandler" in tree else []
    for number, entry in enumerate([*listed(tree, "plugins"), *handler]):
        plugin = mapping(entry, f"plugins.{number}")
        kind = plugin.get("type")
        if not isinstance(kind, str) or not kind:
            raise ConfigError(f"plugins.{number}.type: is missing")
        name = str(plugin.get("name") or kind)
        if name in found:
            raise ConfigError(f"plugins.{number}: two plugins are named {name}")
        found[name] = kind, mapping(plugin.get("parameters"), f"plugins.{number}.parameters")
    return found


def _scheduling(tree: Mapping[str, Any], plugins: Plugins, result: Imported) -> None:
    """Import the first scheduling profile or, if a plugin handles stages, the profiles of the stages."""
    profiles = {
        str(each.get("name")): mappings(each, "plugins", "schedulingProfiles.plugins")
        for each in mappings(tree, "schedulingProfiles", "schedulingProfiles")
    }
    handler = import_stages.handler(plugins, result)
    used = [handler.decode, handler.prefill, handler.encode] if handler else list(profiles)[:1]
    if handler and profiles and handler.decode not in profiles:
        raise ConfigError(f"schedulingProfiles: no profile is named {handler.decode[:60]!r}")
    if others := [name for name in profiles if name not in used]:
        result.remarks.append(f"schedulingProfiles: not imported: {', '.join(others)}")
    main = profiles[used[0]] if profiles else [{"pluginRef": name} for name in plugins]
    scheduling = result.section("scheduling")
    filters = _profile(main, plugins, result, scheduling)
    if handler is None:
        for name, parameters in filters:
            _select(name, parameters, result)
        if stages := import_stages.of_one_profile(plugins[str(each["pluginRef"])][0] for each in main):
            result.section("scheduling")["stages"] = stages
    else:
        prefill: dict[str, Any] = {}
        stages = {"prefill": prefill, "decode": {}, "encode": {}}
        of_prefill = _profile(profiles.get(handler.prefill, ()), plugins, result, prefill)
        of_encode = _profile(profiles.get(handler.encode, ()), plugins, result, stages["encode"])
        if stages["encode"].pop("scorers", None):
            result.remarks.append(f"schedulingProfiles: {handler.encode}: encoders need no scorers here")
        for stage, its_filters in (("prefill", of_prefill), ("decode", filters), ("encode", of_encode)):
            if wanted := [each for named in its_filters for each in import_stages.selector(*named, result)]:
                stages[stage]["selector"] = ", ".join(wanted)
        if handler.threshold is not None:
            stages["threshold"] = handler.threshold
        scheduling["stages"] = {key: each for key, each in stages.items() if each != {}}
    if not scheduling:
        del result.tree["scheduling"]


def _profile(
    references: Sequence[Mapping[str, Any]], plugins: Plugins, result: Imported, section: dict[str, Any]
) -> list[tuple[str, Mapping[str, Any]]]:
    """Import the plugins that a profile references: its scorers into `section`, and its picker's number of
    endpoints. Returns the names and parameters of the profile's label filters."""
    weights: dict[str, float] = {}
    filters = []
    for reference in references:
        name = str(reference.get("pluginRef"))
        if name not in plugins:
            raise ConfigError(f"schedulingProfiles.plugins: no plugin is named {name[:60]!r}")
        kind, parameters = plugins[name]
        scorer = SCORERS.get(kind)
        if scorer is not None:
            weight = reference.get("weight", 1)
            weight = 1 if weight is None else weight
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
                raise ConfigError(f"schedulingProfiles.plugins: weight of {name[:60]} must be a number")
            if weight:
                weights[scorer] = weights.get(scorer, 0) + weight
        if kind in _LABEL_FILTERS:
            filters.append((name, parameters))
        if kind in _PICKERS and section is result.tree["scheduling"]:
            most = parameters.get("maxNumOfEndpoints")
            if isinstance(most, int) and not isinstance(most, bool) and most >= 1:
                section["fallbacks"] = min(most - 1, 8)
                if most > 1:
                    result.remarks.append(
                        f"plugins: maxNumOfEndpoints {most} of {name}: for a gateway that takes one address, "
                        "such as agentgateway, set scheduling.fallbacks 0"
                    )
    if weights:
        section["scorers"] = [{"name": name, "weight": weight} for name, weight in weights.items()]
    return filters


def _select(name: str, parameters: Mapping[str, Any], result: Imported) -> None:
    """Import a label selector's equality requirements, and add a remark for each other requirement."""
    wanted = {str(key): str(value) for key, value in mapping(parameters.get("matchLabels"), name).items()}
    for expression in mappings(parameters, "matchExpressions", f"plugins: {name}.matchExpressions"):
        values = expression.get("values")
        if expression.get("operator") == "In" and isinstance(values, list) and len(values) == 1:
            wanted[str(expression.get("key"))] = str(values[0])
        else:
            told = " ".join(str(expression.get(key)) for key in ("key", "operator", "values"))
            result.remarks.append(f"plugins: matchExpressions of {name}: {told[:80]} has no counterpart")
    if wanted:
        result.section("scheduling").setdefault("endpoint_labels", {}).update(wanted)


def _saturation(tree: Mapping[str, Any], plugins: Plugins, result: Imported) -> None:
    control = mapping(tree.get("flowControl"), "flowControl")
    detector = mapping(control.get("saturationDetector"), "flowControl.saturationDetector")
    if not detector:
        detector = mapping(tree.get("saturationDetector"), "saturationDetector")
    detectors = {name: each for name, each in plugins.items() if each[0].endswith("-detector")}
    name = str(detector.get("pluginRef", ""))
    if name and name not in plugins and name not in BUILT_IN:
        raise ConfigError(f"saturationDetector.pluginRef: no plugin is named {name[:60]!r}")
    if not name and detectors and not detector:
        # Without a reference the router uses a configured utilization detector, or else the first detector.
        name = next(
            (each for each, (kind, _) in detectors.items() if kind == _DETECTOR), next(iter(detectors))
        )
    for other in detectors.keys() - {name}:
        result.remarks.append(f"plugins: {other} is not imported: {name or _DETECTOR} is the detector in use")
    # In earlier versions of the router, the section saturationDetector itself has the detector's parameters.
    kind, parameters = plugins.get(name, (name or _DETECTOR, detector if not name else {}))
    if not detector and not detectors:
        return
    bounds = result.section("request_queue_controller")
    if kind == "concurrency-detector":
        most = parameters.get("maxConcurrency", 100)
        is_tokens = parameters.get("concurrencyMode") == "tokens"
        if is_tokens:
            most = parameters.get("maxTokenConcurrency", 1_000_000)
        if isinstance(most, bool) or not isinstance(most, int | float) or not math.isfinite(most):
            raise ConfigError(f"plugins: maxConcurrency of {name[:60]} must be a number")
        if is_tokens:
            bounds |= {"unit": "tokens", "watermark_per_backend": most}
        elif "maxConcurrency" in parameters:
            bounds["max_per_backend"] = min(math.floor(most), MOST_LIMIT)
            result.remarks.append(
                f"{kind}: maxConcurrency {most:g} is the highest limit that the fleet may find "
                "(request_queue_controller.max_per_backend)"
            )
        if parameters.get("headroom"):
            result.remarks.append(f"{kind}: headroom has no counterpart")
    else:
        told = [
            f"{key} {parameters[key]}"
            for key in ("queueDepthThreshold", "kvCacheUtilThreshold")
            if key in parameters
        ]
        result.remarks.append(
            f"{kind}: this picker finds a limit of requests in flight for each endpoint"
            + (f", without {', '.join(told)}" if told else "")
        )
    if not bounds:
        del result.tree["request_queue_controller"]


def _flow_control(tree: Mapping[str, Any], plugins: Plugins, result: Imported) -> None:
    control = mapping(tree.get("flowControl"), "flowControl")
    if not control:
        return
    queue = result.section("fair_request_queue")
    if total := _limit(control, "flowControl", "maxRequests", result):
        queue["total_capacity"], queue["flow_capacity"] = total, min(100, total)
    most_bytes = _limit(control, "flowControl", "maxBytes", result)
    if most_bytes:
        result.remarks.append(
            "flowControl.maxBytes: imported as the limit of each band; bands have no common limit here"
        )
    if control.get("defaultRequestTTL") is not None:
        ttl_s = _duration_s(control["defaultRequestTTL"], "flowControl.defaultRequestTTL")
        if ttl_s > 0:
            queue["queue_ttl"] = f"{ttl_s:.9g}s"
        else:
            result.remarks.append(
                "flowControl.defaultRequestTTL 0: every request has a TTL here, fair_request_queue.queue_ttl"
            )
    if control.get("noEndpointRequestTTL") is not None:
        wait_s = _duration_s(control["noEndpointRequestTTL"], "flowControl.noEndpointRequestTTL")
        queue["queue_without_endpoints"] = True
        if f"{wait_s:.9g}s" != queue.get("queue_ttl"):
            result.remarks.append(
                f"flowControl.noEndpointRequestTTL {wait_s:g}s: requests wait for at most "
                "fair_request_queue.queue_ttl, with endpoints or without"
            )
    if control.get("enableEviction"):
        result.remarks.append(
            "flowControl.enableEviction: the picker evicts only waiting requests, never running ones "
            "(fair_request_queue.overload)"
        )
    bands = mappings(control, "priorityBands", "flowControl.priorityBands")
    default = mapping(control.get("defaultPriorityBand"), "flowControl.defaultPriorityBand")
    for reference, known, key in (
        ("orderingPolicyRef", _ORDERINGS, "ordering"),
        ("fairnessPolicyRef", _FAIRNESS, "fairness"),
    ):
        named = _named_once(reference, (default, *bands), plugins)
        policies = sorted({known[kind] for kind in named if kind in known})
        if policies:
            queue[key] = policies[0]
        if len(policies) > 1:
            result.remarks.append(
                f"flowControl: {reference}: all bands have one policy here; imported {policies[0]}"
            )
        for kind in named:
            if kind not in known:
                result.remarks.append(f"flowControl: {reference} {kind} has no counterpart")
    if limited := list(_limited_bands(bands, most_bytes, result)):
        queue["priority_bands"] = limited
    for key in ("maxRequests", "maxBytes"):
        if default.get(key) is not None:
            result.remarks.append(
                f"flowControl.defaultPriorityBand.{key}: an unconfigured band has the limits of the "
                "nearest configured band at or below it"
            )
    if not queue:
        del result.tree["fair_request_queue"]


def _limited_bands(
    bands: list[Mapping[str, Any]], most_bytes: int, result: Imported
) -> Iterator[dict[str, Any]]:
    """The setting `priority_bands`: the `bands` that have limits, and, if `most_bytes`, the named bands."""
    where, names = "flowControl.priorityBands", {each.priority: each.name for each in NAMED}
    seen: set[int] = set()
    for band in bands:
        priority = band["priority"] if band.get("priority") is not None else 0
        if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
            raise ConfigError(f"{where}.priority: {str(priority)[:40]!r} is no int32")
        if priority in seen:
            raise ConfigError(f"{where}.priority: {priority} is given twice")
        seen.add(priority)
        limits: dict[str, Any] = {
            "capacity": _limit(band, where, "maxRequests", result),
            "bytes": _limit(band, where, "maxBytes", result) or most_bytes,
        }
        given = {key: limit for key, limit in limits.items() if limit}
        if priority in names:
            given["name"] = names.pop(priority)
        if any(limits.values()):
            yield {"priority": priority, **given}
    for priority, left in names.items() if most_bytes else ():
        yield {"priority": priority, "name": left, "bytes": most_bytes}


def _named_once(key: str, bands: Iterable[Mapping[str, Any]], plugins: Plugins) -> list[str]:
    """The types of the plugins that `bands` reference by `key`, without duplicates."""
    names = dict.fromkeys(str(band[key]) for band in bands if band.get(key))
    return list(dict.fromkeys(plugins.get(name, (name, {}))[0] for name in names))


def _limit(section: Mapping[str, Any], where: str, key: str, result: Imported) -> int:
    """A section's limit `maxRequests` or `maxBytes`, at most the picker's maximum; 0 means no limit."""
    value, most_here = section.get(key), _MOST[key]
    if value is None:
        return 0
    most = math.ceil(_quantity(value, f"{where}.{key}"))
    if most > most_here:
        result.remarks.append(f"{where}.{key} {value}: {most_here} is the maximum here")
    return min(most, most_here)


def _quantity(value: object, where: str) -> float:
    """The value of a Kubernetes quantity, such as 500, "1k", "2Gi" or "1e3"."""
    match = _QUANTITY.fullmatch(str(value).strip())
    if match is None or not (match[2] in _UNITS or match[2][0] in "eE"):
        raise ConfigError(f"{where}: {str(value)[:40]!r} is no quantity")
    if match[2] in _UNITS:
        return min(float(match[1]) * _UNITS[match[2]], 1e300)
    return min(float(match[1] + match[2]), 1e300)


def _duration_s(value: object, where: str) -> float:
    """The seconds in a Go duration such as "1m30s"; a number already counts seconds."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
        return float(value)
    parts = _DURATION.findall(value) if isinstance(value, str) else []
    if value != "0" and (not parts or "".join(map("".join, parts)) != value):
        raise ConfigError(f"{where}: {str(value)[:40]!r} is no duration")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def read(paths: Sequence[Path]) -> Imported:
    """Convert the files at `paths`: one `EndpointPickerConfig` (also within a ConfigMap or a chart's values),
    or files with tenants' limits.

    Raises:
        ConfigError: a file cannot be converted; the message names the file, or all files.
    """
    try:
        trees = [tree for path in paths for tree in _trees(path)]
        if not (configs := list(_configs(trees, set()))):
            return import_tenants.imported(trees)
        if len(trees) > 1 or len(configs) > 1:
            raise ConfigError(f"import an {KIND} alone")
        result = imported(configs[0])
        if configs != trees:
            result.remarks.append(f"only the {KIND} in it is imported")
        return result
    except (OSError, UnicodeDecodeError, YamlFault, ConfigError) as fault:
        where = getattr(fault, "filename", ", ".join(map(str, paths)))
        raise ConfigError(f"{where}: {getattr(fault, 'strerror', fault)}") from fault


def _configs(tree: object, seen: set[int]) -> Iterator[Mapping[str, Any]]:
    """Each EndpointPickerConfig in `tree`, also in texts within `tree`. `seen` has the ids of visited
    objects, since an object in YAML may contain an alias of itself."""
    if id(tree) in seen:
        return
    seen.add(id(tree))
    if isinstance(tree, Mapping) and is_foreign(tree):
        yield tree
    elif isinstance(tree, str) and _NAMES_KIND.search(tree):
        yield from _configs(read_yaml(tree), set())
    elif isinstance(tree, Mapping | list):
        for each in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _configs(each, seen)


def _trees(path: Path) -> list[Any]:
    """The documents in the YAML or JSON file at `path`."""
    parts = re.split(r"(?m)^---(?=\s|$).*$", path.read_text(encoding="utf-8"))
    trees = [tree for part in parts if (tree := read_yaml(part)) is not None]
    if not trees:
        raise ConfigError(f"{path} is empty")
    return trees


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = f"file with an {KIND} of the Go picker, or limits of LiteLLM or Envoy AI Gateway (YAML, JSON)"
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help=about)


def run(args: argparse.Namespace) -> int:
    """Print the converted configuration on stdout, and the remarks on stderr, each on its own line."""
    result = read(args.files)
    names = ", ".join(file.name for file in args.files)
    print(f"# Imported from {names}; add discovery and redis.")
    print(yaml.safe_dump(result.tree, sort_keys=False), end="")
    for remark in result.remarks:
        print(f"{names}: {remark}", file=sys.stderr)
    return 0
