"""Converts tenants' limits of LiteLLM and Envoy AI Gateway to the section `tenants` of the configuration.

Of LiteLLM (1.110) it reads config.yaml and the answers of /team/list and /key/list; of Envoy AI Gateway
(v1.0) it reads BackendTrafficPolicy, AIGatewayRoute and GatewayConfig. A remark names each limit without a
counterpart; docs/migration.md has the mapping. The converted nodes, like both products, refuse requests
beyond a limit.
"""

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from picker_fleet.domain.allowlist import FAIRNESS_ID, is_custom
from picker_fleet.domain.config import parse
from picker_fleet.domain.errors import ConfigError
from picker_fleet.domain.tenants import Budget, Limit, Node, Price, is_never_reached, path_fault
from picker_kubernetes.import_result import Imported, listed, mapping, mappings

Object = Mapping[str, Any]
Kind = tuple[
    str, str
]  # unit and `per` of a limit; units and period of a budget; max_parallel_requests and ""
Nodes = dict[str, dict[Kind, float]]  # path of a node -> the amounts of its limits
Rule = tuple[str, dict[str, str], Kind, float]  # place in the file; header -> value (`*`: any); kind, amount

# The limits of LiteLLM; its setting `general_settings.token_rate_limit_type` changes the unit of tokens.
_RATES = {
    "rpm_limit": ("requests", "1m"), "tpm_limit": ("tokens", "1m"), "tpd_limit": ("tokens", "1d"),
    "max_parallel_requests": ("max_parallel_requests", ""),
}  # fmt: skip
_TOKEN_UNITS = {"total": "tokens", "input": "prompt_tokens", "output": "answer_tokens"}
# LiteLLM resets budgets of these durations at midnight, on Mondays, or on the first of a month.
_PERIODS = {"1d": "day", "24h": "day", "7d": "week", "1w": "week", "30d": "month", "1mo": "month"}
_SETTINGS = frozenset((*_RATES, "max_budget", "budget_duration"))
_IS_LIMIT = re.compile(
    r"(limits?|budgets?|budget_config|end_user_budget_id|blocked|max_parallel_requests"
    r"|(default|upperbound)_\w+_(params|settings))$"
)
_DEPLOYMENT_LIMITS = ("rpm", "tpm", "itpm", "otpm", "max_parallel_requests")
# The prices of a token, in dollars, in LiteLLM's configuration.
_PRICES = (
    ("prompt", "input_cost_per_token"), ("answer", "output_cost_per_token"),
    ("cached", "cache_read_input_token_cost"),
)  # fmt: skip
_SECTIONS = ("litellm_settings", "general_settings", "router_settings")
_CONFIG = {"model_list", *_SECTIONS}

_OF_NO_PRODUCT = "neither an EndpointPickerConfig, nor of LiteLLM or Envoy AI Gateway"
_PER = {"Second": "1s", "Minute": "1m", "Hour": "1h", "Day": "1d"}
_TOKEN_TYPES = {"InputToken": "prompt_tokens", "OutputToken": "answer_tokens", "TotalToken": "tokens"}


class _NoCounterpart(Exception):
    """Raised if a rule cannot be converted; the message names the part without a counterpart."""


def imported(trees: Sequence[object]) -> Imported:
    """Convert `trees`, the documents in one product's files. Raises ConfigError, which names a faulty key."""
    result = Imported()
    objects = [tree for tree in trees if isinstance(tree, Mapping) and "apiVersion" in tree]
    if 0 < len(objects) < len(trees):
        raise ConfigError("some of the files have no apiVersion: import the files of one product at a time")
    objects = [each for tree in objects for each in mappings(tree, "items", "items") or [tree]]  # of a List
    nodes = _of_ai_gateway(objects, result) if objects else _LiteLlm(trees, result).nodes()
    if lowered := list(_lowered_to_parents(nodes)):
        result.remarks.append(f"limits of {_some(lowered)} are lowered to a limit above them, or removed")
    if nodes:
        result.section("tenants")["nodes"] = [_members(path, node) for path, node in nodes.items()]
        result.section("extproc").setdefault("trusted_headers", [FAIRNESS_ID[0]])
    parse(result.tree)
    return result


def _members(path: str, amounts: Mapping[Kind, float]) -> dict[str, Any]:
    node: dict[str, Any] = {"path": path, "over_limit": "reject"}
    for (unit, per), amount in amounts.items():
        if unit == "units":
            node["budget"] = {"units": amount, "period": per}
        elif per:
            node.setdefault("limits", []).append({unit: amount, "per": per})
        else:
            node[unit] = amount
    return node


def _is_valid(amounts: Mapping[Kind, float]) -> bool:
    """Whether a node's limits may have the amounts `amounts`."""
    try:
        Node.model_validate(_members("", amounts))
    except ValidationError:
        return False
    return True


def _lowered_to_parents(nodes: Nodes) -> Iterator[str]:
    """Lower each amount that exceeds the same limit of a node above, and remove each limit that can never be
    reached because of another limit above. Yields the paths of the changed nodes."""
    for path, node in nodes.items():
        parts = path.split("/")
        for above in ("/".join(parts[:level]) for level in range(1, len(parts))):
            parent = next((nodes[each] for each in (above, *_wildcards(above)) if each in nodes), {})
            for kind in node.keys() & parent.keys():
                if node[kind] > parent[kind]:
                    node[kind] = parent[kind]
                    yield path
            others = _bounds(parent).values()
            for kind, bound in _bounds(node).items():
                if any(is_never_reached(bound, other) for other in others):
                    del node[kind]
                    yield path


def _bounds(amounts: Mapping[Kind, float]) -> dict[Kind, Limit | Budget]:
    """The limits and budgets in `amounts` that have a period; amounts need not be valid."""
    limit: Callable[..., Limit] = Limit.model_construct
    budget: Callable[..., Budget] = Budget.model_construct
    return {
        (unit, per): budget(units=amount, period=per) if unit == "units" else limit(per=per, **{unit: amount})
        for (unit, per), amount in amounts.items()
        if per
    }


def _wildcards(path: str) -> list[str]:
    """The paths with wildcards whose settings would apply to `path`, the most specific first."""
    parts = path.split("/")
    found = ("/".join((*parts[:-1], "*")), "/".join("*" for _ in parts))
    return [each for each in dict.fromkeys(found) if each != path]


def _some(names: Iterable[str]) -> str:
    """A text with at most three of `names`, and how many more there are."""
    few = list(dict.fromkeys(names))
    return ", ".join(few[:3]) + (f" and {len(few) - 3} more" if len(few) > 3 else "")


class _LiteLlm:
    """Converts LiteLLM's config.yaml, teams and keys. One remark names all nodes that lack a counterpart."""

    def __init__(self, trees: Sequence[object], result: Imported) -> None:
        config: dict[str, Any] = {}
        self._teams: list[Object] = []
        self._keys: list[Object] = []
        for tree in trees:
            answer = tree if isinstance(tree, Mapping) else {"teams": tree}
            if not answer.keys() & {"teams", "keys", *_CONFIG}:
                raise ConfigError(_OF_NO_PRODUCT)
            config |= {key: answer[key] for key in _CONFIG if key in answer}
            self._teams += mappings(answer, "teams", "teams: /team/list answers objects")
            self._keys += mappings(answer, "keys", "keys: add return_full_object=true to /key/list")
        self._settings = {
            key: value for name in _SECTIONS for key, value in mapping(config.get(name), name).items()
        }
        self._models = mappings(config, "model_list", "model_list")
        self._token_unit = _TOKEN_UNITS.get(str(self._settings.get("token_rate_limit_type")), "tokens")
        self._result = result
        self._left_out: defaultdict[str, list[str]] = defaultdict(list)  # start of a remark -> paths of nodes
        for kind in ("team", "key"):
            answers = [tree for tree in trees if isinstance(tree, Mapping) and f"{kind}s" in tree]
            pages = [answer["total_pages"] for answer in answers if "total_pages" in answer]
            if any(isinstance(total, int) and total > len(pages) for total in pages):
                told = f"{kind}s: only {len(pages)} of {pages[0]} pages of /{kind}/list are given"
                result.remarks.append(told)

    def nodes(self) -> Nodes:
        nodes: Nodes = {}
        paths: dict[str, str] = {"": ""}  # id of a team -> path of its node
        teams = {str(team.get("team_id") or team.get("team_alias") or ""): team for team in self._teams}
        for identity, team in teams.items():
            alias = team.get("team_alias")
            # Another team may have no name but its id, so no alias may be such an id.
            path = paths[identity] = _path("", None if str(alias) in teams else alias, identity, nodes)
            nodes[path] = self._node(team, path, "teams")
            self._keys += [each for each in listed(team, "keys") if isinstance(each, Mapping)]
        # The answers of /team/list and /key/list may contain the same key.
        for token, key in {str(key.get("token") or at): key for at, key in enumerate(self._keys)}.items():
            team_id = str(key.get("team_id") or "")
            above = paths.setdefault(team_id, _path("", None, team_id, nodes))
            path = _path(above, key.get("key_alias"), token, nodes)
            nodes[path] = self._node(key, path, "keys")
        nodes = {path: node for path, node in nodes.items() if node}
        self._set_prices(nodes)
        remarks = self._result.remarks
        if rest := [key for key in map(str, self._settings) if _IS_LIMIT.search(key)]:
            told = f"{', '.join(rest)}: not imported"
            remarks.append(f"{told}; the nodes `*` and `*/*` may have limits for each team and key")
        given = [mapping(each.get("litellm_params"), "litellm_params") for each in self._models]
        if rest := [limit for limit in _DEPLOYMENT_LIMITS if any(limit in each for each in given)]:
            remarks.append(f"model_list: {', '.join(rest)}: the fleet finds a limit for each endpoint")
        remarks += [f"{what} of {_some(paths)}" for what, paths in self._left_out.items()]
        return nodes

    def _node(self, settings: Object, path: str, kind: str) -> dict[Kind, float]:
        """The node of a team or key. The settings may be in a budget table that several keys share."""
        table = mapping(settings.get("litellm_budget_table"), f"{kind}: litellm_budget_table of {path}")
        own = {key: value for key, value in settings.items() if value is not None}
        given: dict[str, Any] = {key: value for key, value in table.items() if key in _SETTINGS} | own
        more = {f"metadata.{key}": value for key, value in mapping(given.get("metadata"), "metadata").items()}
        members = mappings(given, "team_memberships", f"{kind}: team_memberships of {path}")
        more["team_memberships.budgets"] = any(each.get("litellm_budget_table") for each in members)
        for key, value in (given | more).items():
            if value and key not in _SETTINGS and _IS_LIMIT.search(key):
                self._left_out[f"{kind}: no counterpart has {key}"].append(path)

        node: dict[Kind, float] = {}
        for key in (*_RATES, "max_budget"):
            if given.get(key) is None:
                continue
            amount = _number(given[key], f"{kind}: {key} of {path}")
            duration = str(given.get("budget_duration") or "")
            unit, per = _RATES.get(key) or ("units", _PERIODS.get(duration, ""))
            limit = {(self._token_unit if unit == "tokens" else unit, per): amount}
            if not amount:
                what = "0, which forbids every request,"
            elif not (per or key in _RATES):
                what = f"per {duration[:20]}" if duration else "without budget_duration"
            elif _is_valid(limit):
                node |= limit
                continue
            else:
                what = f"{amount:g}"
            self._left_out[f"{kind}: no counterpart has {key} {what}"].append(path)
        return node

    def _set_prices(self, nodes: Nodes) -> None:
        """Set the prices that LiteLLM's budgets need, since these are in dollars."""
        if not any(unit == "units" for node in nodes.values() for unit, _ in node):
            return
        prices: dict[str, dict[str, float]] = {}
        for model in self._models:
            costs = {**mapping(model.get("model_info"), "model_info")}
            costs |= mapping(model.get("litellm_params"), "litellm_params")
            kept = _PRICES if "cache_read_input_token_cost" in costs else _PRICES[:2]
            with contextlib.suppress(KeyError, ValueError):
                # YAML reads a number such as `3e-05`, which has no point, as a text.
                found = {part: float(str(costs[key])) for part, key in kept}
                Price.model_validate(found)
                prices.setdefault(str(model.get("model_name")), found)
        if prices:
            self._result.section("tenants")["prices"] = prices
        names = [str(model.get("model_name")) for model in self._models] or ["*"]
        if missing := [name for name in names if name not in prices]:
            told = f"budgets are in dollars: set tenants.prices of {_some(missing)} to dollars a token"
            self._result.remarks.append(f"{told}; without a price each token costs 1")


def _number(value: object, where: str) -> float:
    number = -1.0
    with contextlib.suppress(ValueError):
        # YAML reads a number such as `3e-05`, which has no point, as a text.
        number = float(str(value))
    if not 0 <= number < math.inf:
        raise ConfigError(f"{where}: {str(value)[:40]!r} is no number of at least 0")
    return int(number) if number.is_integer() else number


def _path(above: str, alias: object, identity: str, nodes: Nodes) -> str:
    """The path of a child of `above` by its alias, or by its id if another node has the same alias or no path
    can have the alias."""
    names = [re.sub(r"[/*]", "_", str(name)) for name in (alias or identity, identity)]
    paths = [f"{above}/{name}" if above else name for name in names]
    return next((path for path in paths if path not in nodes and not path_fault(path, "/")), paths[-1])


def _of_ai_gateway(objects: Sequence[Object], result: Imported) -> Nodes:
    if not any("envoyproxy.io/" in str(each.get("apiVersion")) for each in objects):
        raise ConfigError(_OF_NO_PRODUCT)
    types: dict[str, str] = {}
    for each in objects:
        spec = mapping(each.get("spec"), "spec")
        for key in ("llmRequestCosts", "globalLLMRequestCosts"):
            for cost in mappings(spec, key, key):
                types.setdefault(str(cost.get("metadataKey")), str(cost.get("type")))
    rules: list[Rule] = []
    for each in objects:
        name = f"{each.get('kind')} {mapping(each.get('metadata'), 'metadata').get('name')}"
        limits = mapping(mapping(each.get("spec"), "spec").get("rateLimit"), f"{name}: rateLimit")
        if each.get("kind") == "QuotaPolicy" or limits.get("local"):
            told = "limits of a node hold for the fleet and all models"
            result.remarks.append(f"{name} has no counterpart: {told}")
        several = mapping(limits.get("global"), f"{name}: global")
        for number, rule in enumerate(mappings(several, "rules", f"{name}: rules")):
            where = f"{name}, rule {number}"
            try:
                rules.append((where, _selects(rule, where), *_limit(rule, where, types)))
            except _NoCounterpart as part:
                result.remarks.append(f"{where}: {part} has no counterpart")
    return _tree_of(rules, result)


def _selects(rule: Object, where: str) -> dict[str, str]:
    """The headers by which a rule selects requests, with their values; `*` stands for any value."""
    if rule.get("shadowMode"):
        raise _NoCounterpart("shadowMode")
    found: dict[str, str] = {}
    for selector in mappings(rule, "clientSelectors", f"{where}: clientSelectors"):
        if rest := sorted(selector.keys() - {"headers"}):
            raise _NoCounterpart(f"a selector by {', '.join(rest)}")
        for header in mappings(selector, "headers", f"{where}: headers"):
            name, kind = str(header.get("name")).lower(), str(header.get("type") or "Exact")
            value = "*" if kind == "Distinct" else str(header.get("value"))
            is_exact = kind == "Exact" and not re.search(r"[/*]", value) and not path_fault(value, "/")
            is_known = is_custom(name) and name != "x-ai-eg-model" and not header.get("invert")
            if not is_known or not (is_exact or kind == "Distinct"):
                raise _NoCounterpart(f"the selector {name[:60]} {kind} {value[:60]}")
            if found.setdefault(name, value) != value:
                raise _NoCounterpart(f"a rule with two selectors of {name[:60]}")
    if not found:
        raise _NoCounterpart("a limit of all tenants together")
    return found


def _limit(rule: Object, where: str, types: Mapping[str, str]) -> tuple[Kind, float]:
    limit = mapping(rule.get("limit"), f"{where}: limit")
    cost = mapping(rule.get("cost"), f"{where}: cost")
    response = mapping(cost.get("response"), f"{where}: cost.response")
    amount = _number(limit.get("requests"), f"{where}: limit.requests")
    per, unit = str(limit.get("unit")), "requests"
    if response:
        key = str(mapping(response.get("metadata"), f"{where}: metadata").get("key"))
        kind = types.get(key, "unknown")  # the file's llmRequestCosts lack this key
        if kind not in _TOKEN_TYPES:
            raise _NoCounterpart(f"the cost {key[:60]} of type {kind}")
        unit = _TOKEN_TYPES[kind]
    if mapping(cost.get("request"), f"{where}: cost.request").get("number", 1) != (0 if response else 1):
        raise _NoCounterpart("this cost of a request")
    if amount and per == "Month" and unit == "tokens":
        return ("units", "month"), amount
    if not amount or per not in _PER:
        raise _NoCounterpart(f"the limit {amount:g} per {per}")
    return (unit, _PER[per]), amount


def _tree_of(rules: Sequence[Rule], result: Imported) -> Nodes:
    """The tenant nodes for `rules`. Each header is a tree level; rules with few headers set upper levels."""
    headers: list[str] = []
    nodes: Nodes = {}
    for where, selects, kind, amount in sorted(rules, key=lambda rule: len(rule[1])):
        if not selects.keys() >= set(headers):
            told = f"{where}: not imported, since the tree's levels are {', '.join(headers)}"
            result.remarks.append(f"{told}; the rule has {', '.join(selects)}")
            continue
        headers += [name for name in selects if name not in headers]
        values = [selects[name] for name in headers]
        if "*" in values[:-1] and set(values) != {"*"}:
            result.remarks.append(f"{where}: a selector below one of type Distinct has no counterpart")
            continue
        node = nodes.setdefault("/".join(values), {})
        node[kind] = min(amount, node.get(kind, math.inf))
    # Envoy applies every rule that matches, but here only one node applies: it gets the limits of all rules.
    for path, node in nodes.items():
        for kind, amount in (each for other in _wildcards(path) for each in nodes.get(other, {}).items()):
            node[kind] = min(amount, node.get(kind, math.inf))
    if headers:
        result.section("extproc")["trusted_headers"] = headers
        result.section("tenants")["headers"] = list(headers)
    return nodes
