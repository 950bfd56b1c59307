"""Reads the encode, prefill and decode profiles of an `EndpointPickerConfig`; import_config.py calls it.

Sources: the plugins' README and sources in github.com/llm-d/llm-d-router,
pkg/epp/framework/plugins/scheduling/profilehandler/disagg.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from picker_fleet.domain.errors import ConfigError
from picker_fleet.endpoints.stages import ROLE
from picker_kubernetes.import_result import Imported, mapping, mappings

_OLDER = ("pd-profile-handler", "pd-slo-profile-handler")
HANDLERS = ("disagg-profile-handler", *_OLDER)
_NEVER_TOKENS = 1_000_000_000  # a threshold that no prompt exceeds
# Filter -> the roles that it keeps (pkg/epp/framework/plugins/scheduling/filter/bylabel). The decode filter
# keeps the endpoints that decode here by default.
_KEPT_ROLES: Mapping[str, str] = {
    "prefill-filter": "prefill,prefill-decode,both,encode-prefill,encode-prefill-decode",
    "encode-filter": "encode,encode-prefill,encode-decode,encode-prefill-decode",
}

Plugins = Mapping[str, tuple[str, Mapping[str, Any]]]  # name of a plugin -> its type and parameters


@dataclass(frozen=True, slots=True)
class Handler:
    """The plugin that handles a file's stages: the names of its profiles, and the number of uncached tokens
    to import as `scheduling.stages.threshold` (None: the file has no threshold)."""

    decode: str
    prefill: str
    threshold: int | None
    encode: str = ""  # name of the encode profile; '' without one


def handler(plugins: Plugins, result: Imported) -> Handler | None:
    """The plugin that handles prefill and decode profiles; None without such a plugin."""
    for name, (kind, parameters) in plugins.items():
        if kind == "disagg-profile-handler":
            # Until v0.10 these parameters also had flat names, which llm-d's guides still use.
            named = parameters.get("prefillDeciderPluginName") or parameters.get("deciderPluginName")
            flat = {"prefill": named, "encode": parameters.get("encodeDeciderPluginName")}
            deciders = {**flat, **mapping(parameters.get("deciders"), f"plugins: {name}.deciders")}
            profiles = {
                **{stage: parameters.get(f"{stage}Profile") for stage in ("decode", "prefill", "encode")},
                **mapping(parameters.get("profiles"), f"plugins: {name}.profiles"),
            }
            return Handler(
                str(profiles.get("decode") or "decode"),
                str(profiles.get("prefill") or "prefill"),
                _decided(deciders.get("prefill"), plugins, result),
                str(profiles.get("encode") or "encode") if deciders.get("encode") else "",
            )
        if kind in _OLDER:
            decider = parameters.get("deciderPluginName")
            return Handler(
                str(parameters.get("decodeProfile") or "decode"),
                str(parameters.get("prefillProfile") or "prefill"),
                _decided(decider, plugins, result) if decider else _old(parameters, plugins, result),
            )
    return None


def _old(parameters: Mapping[str, Any], plugins: Plugins, result: Imported) -> int | None:
    """The threshold of an older handler without `deciderPluginName`: earlier versions have the parameter
    `threshold`, later versions a decider with a default name."""
    if "threshold" in parameters:
        return max(_tokens(parameters["threshold"], "threshold") - 1, 0)
    default = "prefix-based-pd-decider"
    return _decided(default, plugins, result) if default in plugins else None


def _decided(name: object, plugins: Plugins, result: Imported) -> int | None:
    """The threshold of the decider `name`; without a decider no request is split."""
    if name and str(name) not in plugins:
        raise ConfigError(f"plugins: no decider is named {str(name)[:60]!r}")
    kind, parameters = plugins[str(name)] if name else ("", {})
    if kind == "always-disagg-pd-decider":
        return 0
    if kind not in ("", "prefix-based-pd-decider"):
        result.remarks.append(
            f"plugins: the decider {name} (type {kind}) has no counterpart; threshold is auto"
        )
        return None
    # The decider splits at `nonCachedTokens` or more tokens; this picker splits above its threshold.
    least = _tokens(parameters.get("nonCachedTokens") or 0, "nonCachedTokens")
    if least:
        return least - 1
    result.remarks.append("plugins: no decider splits requests, so prefill endpoints get none")
    return _NEVER_TOKENS


def _tokens(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _NEVER_TOKENS:
        raise ConfigError(f"plugins: {what}: {str(value)[:40]!r} is no number of tokens")
    return value


def of_one_profile(kinds: Iterable[str]) -> dict[str, Any]:
    """The section `scheduling.stages` for the plugins `kinds` of an only profile: a router of one stage
    sends whole requests to the endpoints of this stage. {} if that stage is decode."""
    kept = [f"{ROLE} in ({_KEPT_ROLES[kind]})" for kind in kinds if kind in _KEPT_ROLES]
    return {"decode": {"selector": ", ".join(kept)}, "threshold": _NEVER_TOKENS} if kept else {}


def selector(name: str, parameters: Mapping[str, Any], result: Imported) -> list[str]:
    """The requirements of the label selector `parameters` of the plugin `name`, as Kubernetes spells them."""
    labels = mapping(parameters.get("matchLabels"), name)
    found = [f"{key}={value}" for key, value in labels.items()]
    for each in mappings(parameters, "matchExpressions", f"plugins: {name}.matchExpressions"):
        key, operator = each.get("key"), each.get("operator")
        values = each.get("values")
        listed = f"({','.join(map(str, values))})" if isinstance(values, list) else ""
        forms = {"In": f"{key} in {listed}", "NotIn": f"{key} notin {listed}", "Exists": f"{key}"}
        form = {**forms, "DoesNotExist": f"!{key}"}.get(str(operator))
        if form is None or (operator in ("In", "NotIn") and not listed):
            told = f"{key} {operator} {values}"
            result.remarks.append(f"plugins: matchExpressions of {name}: {told[:80]} has no counterpart")
        else:
            found.append(form)
    return found
