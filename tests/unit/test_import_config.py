"""Import of an EndpointPickerConfig: keys with a counterpart, keys without one, malformed files."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tables import cases

from picker_fleet import cli
from picker_fleet.domain.config import parse
from picker_fleet.domain.errors import ConfigError
from picker_fleet.domain.request import Endpoint
from picker_fleet.endpoints.stages import ROLE, with_stages
from picker_kubernetes import import_config
from picker_kubernetes.import_result import Imported

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
HEAD = {"apiVersion": "inference.networking.x-k8s.io/v1alpha1", "kind": "EndpointPickerConfig"}


def imported(**more: Any) -> Imported:
    return import_config.imported({**HEAD, **more})


def assert_named(result: Imported, *texts: str) -> None:
    remarks = "\n".join(result.remarks)
    assert [text for text in texts if text not in remarks] == []


def test_scorers_of_the_first_profile_keep_their_weights() -> None:
    result = imported(
        plugins=[
            {"type": "queue-scorer", "name": "queue"},
            {"type": "kv-cache-utilization-scorer"},
            {"type": "max-score-picker", "parameters": {"maxNumOfEndpoints": 3}},
            {"type": "single-profile-handler"},
        ],
        schedulingProfiles=[
            {"name": "default", "plugins": [
                {"pluginRef": "queue", "weight": 2.5},
                {"pluginRef": "kv-cache-utilization-scorer", "weight": 0},
                {"pluginRef": "max-score-picker"},
            ]},
            {"name": "prefill", "plugins": []},
        ],
    )  # fmt: skip
    assert result.tree["scheduling"] == {"fallbacks": 2, "scorers": [{"name": "queue-depth", "weight": 2.5}]}
    assert result.remarks == [
        "schedulingProfiles: not imported: prefill",
        "plugins: maxNumOfEndpoints 3 of max-score-picker: for a gateway that takes one address, such "
        "as agentgateway, set scheduling.fallbacks 0",
    ]


def test_every_scorer_of_a_file_without_profiles_is_imported_once() -> None:
    result = imported(plugins=[{"type": "queue-scorer"}, {"type": "lora-affinity-scorer"}])
    assert [each["name"] for each in result.tree["scheduling"]["scorers"]] == ["queue-depth", "lora-affinity"]


def test_flow_control_is_imported_as_settings_of_the_queue() -> None:
    fairness = "round-robin-fairness-policy"
    result = imported(
        featureGates=["flowControl", "other"],
        plugins=[
            {"type": "edf-ordering-policy", "name": "edf"},
            {"type": fairness},
            {"type": "concurrency-detector", "parameters": {"maxConcurrency": 40}},
        ],
        saturationDetector={"pluginRef": "concurrency-detector"},
        flowControl={
            "maxRequests": "2k", "maxBytes": "1Gi", "defaultRequestTTL": "45s",
            "priorityBands": [
                {"priority": 5, "orderingPolicyRef": "edf", "fairnessPolicyRef": fairness},
                {"priority": -5, "maxRequests": 10},
                {"priority": 0, "maxRequests": "1k", "maxBytes": "1Mi"},
            ],
            "defaultPriorityBand": {"maxRequests": 5, "maxBytes": "2Gi"},
        },
    )  # fmt: skip
    settings = parse(result.tree)
    queue = settings.fair_request_queue
    assert (queue.total_capacity, queue.queue_ttl) == (2000, 45)
    assert (queue.ordering, queue.fairness) == ("edf", "round-robin")
    assert settings.request_queue_controller.max_per_backend == 40
    assert settings.request_queue_controller.is_adaptive
    assert [queue.bands.of(priority).capacity for priority in (-5, 0, 5)] == [10, 1000, 1000]
    # The key flowControl.maxBytes becomes the byte limit of each band without an own maxBytes.
    sizes = {band.priority: band.bytes for band in queue.bands}
    assert sizes == {10: 2**30, 5: 2**30, 0: 2**20, -5: 2**30, -10: 2**30}
    assert_named(
        result, "defaultPriorityBand.maxRequests", "defaultPriorityBand.maxBytes", "flowControl.maxBytes",
        "featureGates: other",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "seconds"), [("1m30s", 90), ("1h0m0s", 3600), ("1.5h", 5400), ("250ms", 0.25), (30, 30)]
)
def test_a_ttl_in_the_syntax_of_go_durations_is_imported(text: object, seconds: float) -> None:
    tree = imported(flowControl={"defaultRequestTTL": text}).tree
    assert parse(tree).fair_request_queue.queue_ttl == seconds


def test_the_value_zero_in_an_endpoint_picker_config_sets_no_limit() -> None:
    bands = [{"priority": 0, "maxRequests": 0}]
    result = imported(flowControl={"maxRequests": "0", "defaultRequestTTL": "0s", "priorityBands": bands})
    assert result.tree == {}
    assert "defaultRequestTTL" in "".join(result.remarks)


def test_a_priority_band_without_a_priority_has_priority_zero() -> None:
    bands = parse(imported(flowControl={"priorityBands": [{"maxRequests": 7}]}).tree).fair_request_queue.bands
    assert bands.of(0).capacity == 7


@pytest.mark.parametrize(
    ("text", "capacity"), [("1Ki", 1024), ("1e3", 1000), ("1500m", 2), ("1Ti", 100_000), (7, 7)]
)
def test_an_imported_limit_may_be_any_kubernetes_quantity(text: object, capacity: int) -> None:
    result = imported(flowControl={"maxRequests": text})
    assert parse(result.tree).fair_request_queue.total_capacity == capacity
    assert ("is the maximum here" in "".join(result.remarks)) == (text == "1Ti")


def test_remarks_name_plugins_and_keys_without_a_counterpart() -> None:
    result = imported(
        plugins=[{"type": "token-producer", "name": "e"}, {"type": "vllmgrpc-parser", "name": "p"}],
        parser={"pluginRef": "p"}, saturationDetector={"queueDepthThreshold": 5}, strange={},
    )  # fmt: skip
    plugins = ("e (type token-producer) has no counterpart; set scheduling.kv_events_port", "vllmgrpc-parser")
    assert_named(result, *plugins, "queueDepthThreshold 5", "strange")


def test_each_key_of_a_v0_10_configuration_is_imported_or_named_in_a_remark() -> None:
    fast = {"matchLabels": {"tier": "fast"}, "matchExpressions": [
        {"key": "gpu", "operator": "In", "values": ["h100"]}, {"key": "old", "operator": "DoesNotExist"},
    ]}  # fmt: skip
    result = import_config.imported({
        "apiVersion": "llm-d.ai/v1", "kind": "EndpointPickerConfig",
        "featureGates": ["flowControl=true", "haPopulateNonLeaderDatastore"],
        "plugins": [
            {"type": "decode-filter"},
            {"type": "label-selector-filter", "name": "fast", "parameters": fast},
            {"type": "concurrency-detector", "name": "busy", "parameters": {"maxConcurrency": 40, "x": 1}},
            {"type": "utilization-detector"},
            {"type": "weighted-random-picker", "parameters": {"maxNumOfEndpoints": 2}, "stage": "late"},
            {"type": "anthropic-parser"}, {"type": "vertexai-parser"},
            {"type": "metrics-data-source", "parameters": {"scheme": "https"}},
        ],
        "schedulingProfiles": [{"name": "default", "stage": 1, "plugins": [
            {"pluginRef": "decode-filter"}, {"pluginRef": "fast", "mode": "soft"},
            {"pluginRef": "weighted-random-picker", "weight": None},
        ]}],
        "dataLayer": {
            "injectDefaults": True, "crossReplica": {"syncInterval": "1s"}, "discovery": {},
            "sources": [{"pluginRef": "metrics-data-source", "extractors": [{"pluginRef": "e", "y": 1}]}],
        },
        "requestHandler": {"parsers": [{"pluginRef": "anthropic-parser"}], "propagatePriority": True},
        "flowControl": {
            "saturationDetector": {"pluginRef": "busy", "z": 1}, "enableEviction": True,
            "defaultRequestTTL": "30s", "noEndpointRequestTTL": "10m", "bandSelectionPolicyPluginRef": "b",
            "priorityBands": [{"priority": 0, "maxRequests": 5, "defaultRequestTTL": "1s"}],
            "defaultNegativePriorityBand": {},
        },
    })  # fmt: skip
    settings = parse(result.tree)
    assert settings.scheduling.endpoint_labels == {"tier": "fast", "gpu": "h100"}
    assert settings.scheduling.fallbacks == 1
    assert settings.request_queue_controller.max_per_backend == 40
    assert settings.fair_request_queue.queue_without_endpoints
    assert settings.scraping.scheme == "https"
    assert_named(
        result, "haPopulateNonLeaderDatastore", "old DoesNotExist", "of busy (x)", "plugins.stage",
        "utilization-detector is not imported", "schedulingProfiles.stage", "schedulingProfiles.plugins.mode",
        "dataLayer.crossReplica", "dataLayer.discovery", "extractors.y",
        "requestHandler.propagatePriority", "saturationDetector.z", "enableEviction", "noEndpointRequestTTL",
        "bandSelectionPolicyPluginRef", "priorityBands.defaultRequestTTL", "defaultNegativePriorityBand",
        "weighted-random-picker (type weighted-random-picker): this picker picks the best", "vertexai-parser",
    )  # fmt: skip


SPECS = {"queuedRequestsSpec": "own:waiting{kind=text}", "runningRequestsSpec": "own:running",
         "kvUsageSpec": "own:kv", "loraSpec": "own:lora", "cacheInfoSpec": "own:cache"}  # fmt: skip


def test_the_metrics_pages_and_series_of_a_data_layer_are_imported() -> None:
    parameters = {
        "engineLabelKey": "x/engine", "defaultEngine": "own",
        "engineConfigs": [{"name": "other"}, {"name": "own", **SPECS}],
    }  # fmt: skip
    result = imported(plugins=[
        plugin("metrics-data-source", "pages", scheme="https", path="/m", insecureSkipVerify=False),
        plugin("core-metrics-extractor", "figures", **parameters),
    ])  # fmt: skip
    scraping = parse(result.tree).scraping
    assert (scraping.scheme, scraping.engine_label) == ("https", "x/engine")
    assert scraping.series == {
        "path": "/m", "waiting": "own:waiting{kind=text}", "running": "own:running",
        "kv_utilisation": "own:kv", "adapters": "own:lora",
    }  # fmt: skip
    assert_named(result, "set scraping.ca", "not imported: other", "keys of own (cacheInfoSpec)")
    assert len(result.remarks) == 3


def test_the_data_layer_of_the_references_chart_needs_no_setting() -> None:
    pages = plugin("metrics-data-source", "pages", scheme="http", path="/metrics", insecureSkipVerify=True)
    result = imported(plugins=[pages, plugin("core-metrics-extractor", defaultEngine="trtllm-serve")])
    assert (result.tree, result.remarks) == ({}, [])


def staged(
    prefill: list[Any],
    decode: list[Any],
    *plugins: dict[str, Any],
    encode: list[Any] | None = None,
    **more: Any,
) -> Imported:
    """Import a file with `plugins` and two or three profiles, of names or pairs of name and weight."""

    def references(entries: list[Any]) -> list[dict[str, Any]]:
        pairs = [each if isinstance(each, tuple) else (each, None) for each in entries]
        return [
            {"pluginRef": name, **({} if weight is None else {"weight": weight})} for name, weight in pairs
        ]

    profiles = {"prefill": prefill, "decode": decode} | ({} if encode is None else {"encode": encode})
    return imported(plugins=list(plugins), schedulingProfiles=[
        {"name": name, "plugins": references(entries)} for name, entries in profiles.items()
    ], **more)  # fmt: skip


BY_PREFIX, ALWAYS, OLD = "prefix-based-pd-decider", "always-disagg-pd-decider", "pd-profile-handler"
MEDIA = "always-disagg-multimodal-decider"


def plugin(kind: str, name: str = "d", **parameters: object) -> dict[str, Any]:
    return {"type": kind, "name": name, "parameters": parameters}


def flat(**parameters: object) -> dict[str, Any]:
    return {"type": "disagg-profile-handler", "parameters": parameters}


def disagg(**deciders: str) -> dict[str, Any]:
    return flat(deciders=deciders)


def test_the_guide_of_llm_d_for_prefill_and_decode_is_imported_with_one_remark() -> None:
    result = staged(
        ["prefill-filter", "prefix-cache-affinity-filter", "token-load-scorer", "max-score-picker"],
        ["decode-filter", "active-request-scorer", "max-score-picker"],
        disagg(prefill="always-disagg-pd-decider"),
        {"type": "always-disagg-pd-decider"},
        {"type": "prefill-filter"}, {"type": "decode-filter"}, {"type": "inflight-load-producer"},
        {"type": "prefix-cache-affinity-filter", "parameters": {"peakPrefillThroughput": 30000}},
        {"type": "token-load-scorer"}, {"type": "active-request-scorer"}, {"type": "max-score-picker"},
    )  # fmt: skip
    scheduling = parse(result.tree).scheduling
    assert scheduling.stages.threshold == 0  # each request is split
    assert scheduling.weights == {"in-flight": 1}
    assert scheduling.prefill_weights == {"prefix-affinity": 1, "in-flight": 1}
    remark = "parameters of prefix-cache-affinity-filter (peakPrefillThroughput) have no counterpart"
    assert result.remarks == [f"plugins: {remark}"]


@pytest.mark.parametrize("scorer", ["pd-slo-pair-optimizer", "pd-slo-optimizer"])
def test_the_llm_d_config_with_latency_objectives_for_prefill_and_decode_is_imported(scorer: str) -> None:
    pair = {"type": scorer, "parameters": {"ttftWeight": 0.8}}
    kinds = ("prefill-header-handler", "prefill-filter", "decode-filter", "prefix-cache-scorer")
    own = [("prefix-cache-scorer", 2), (scorer, 3)]
    handler = {"type": "pd-slo-profile-handler", "parameters": {"hashBlockSize": 16}}
    result = staged(
        ["prefill-filter", *own], ["decode-filter", *own], pair, *({"type": kind} for kind in kinds),
        profileHandler=handler,
    )  # fmt: skip
    scheduling = parse(result.tree).scheduling
    assert scheduling.weights == scheduling.prefill_weights == {"prefix-affinity": 2, "slo-headroom": 3}
    assert scheduling.stages.threshold is None
    assert result.remarks == [
        f"plugins: parameters of {scorer} (ttftWeight) have no counterpart",
        "plugins: parameters of pd-slo-profile-handler (hashBlockSize) have no counterpart",
    ]


@cases("plugins, threshold", {
    "uncached tokens": ([disagg(prefill="d"), plugin(BY_PREFIX, nonCachedTokens=16)], 15),
    "no tokens, which never splits": ([disagg(prefill="d"), plugin(BY_PREFIX)], 10**9),
    "no decider, which never splits": ([disagg()], 10**9),
    "a decider of another kind": ([disagg(prefill="d"), plugin("own-decider")], None),
    "a flat name": ([flat(prefillDeciderPluginName="d"), plugin(BY_PREFIX, nonCachedTokens=16)], 15),
    "an older flat name": ([flat(deciderPluginName="d", decodeProfile="decode"), plugin(ALWAYS)], 0),
    "the old handler, always": ([plugin(OLD, threshold=0)], 0),
    "the old handler, from ten tokens on": ([plugin(OLD, threshold=10)], 9),
    "the old handler with a decider": ([plugin(OLD, "pd", deciderPluginName="d"), plugin(ALWAYS)], 0),
})  # fmt: skip
def test_a_decider_of_llm_d_becomes_a_threshold(plugins: list[dict[str, Any]], threshold: object) -> None:
    result = staged([], ["queue-scorer"], *plugins, {"type": "queue-scorer"})
    assert parse(result.tree).scheduling.stages.threshold == threshold
    if threshold is None or threshold == 10**9:
        assert_named(result, "no decider splits" if threshold == 10**9 else "own-decider) has no counterpart")


def test_label_filters_of_stages_become_selectors() -> None:
    expressions = [
        {"key": "role", "operator": "In", "values": ["prefill", "both"]},
        {"key": "old", "operator": "DoesNotExist"}, {"key": "gpu", "operator": "Exists"},
        {"key": "rack", "operator": "NotIn", "values": ["r1"]},
        {"key": "n", "operator": "Gt", "values": ["1"]},
    ]  # fmt: skip
    result = staged(
        ["p", ("queue-scorer", 2)], ["d", ("queue-scorer", 3)],
        {"type": "label-selector-filter", "name": "p", "parameters": {"matchExpressions": expressions}},
        {"type": "by-label-selector", "name": "d", "parameters": {"matchLabels": {"role": "decode"}}},
        {"type": "queue-scorer"}, {"type": ALWAYS}, {"type": "always-disagg-multimodal-decider"},
        disagg(prefill="always-disagg-pd-decider", encode="always-disagg-multimodal-decider"),
    )  # fmt: skip
    scheduling = parse(result.tree).scheduling
    stages = scheduling.stages
    assert stages.prefill.selector == "role in (prefill,both), !old, gpu, rack notin (r1)"
    assert (stages.decode.selector, scheduling.endpoint_labels) == ("role=decode", {})
    assert (scheduling.weights, scheduling.prefill_weights) == ({"queue-depth": 3}, {"queue-depth": 2})
    assert_named(result, "n Gt ['1'] has no counterpart")


def test_the_profile_encode_of_llm_d_becomes_a_stage() -> None:
    plugins = (
        {"type": "by-label-selector", "name": "e", "parameters": {"matchLabels": {"role": "encode"}}},
        {"type": "queue-scorer"}, {"type": MEDIA}, {"type": "own-decider"},
    )  # fmt: skip
    result = staged([], [], *plugins, disagg(encode=MEDIA), encode=["e"])
    stages = parse(result.tree).scheduling.stages
    assert (stages.encode.selector, stages.threshold) == ("role=encode", 10**9)
    assert_named(result, "no decider splits")
    result = staged([], [], *plugins, disagg(encode="own-decider"), encode=["queue-scorer"])
    named = ("encoders need no scorers", "own-decider) has no counterpart")
    assert_named(result, "no decider splits", *named)
    unused = staged([], [], *plugins, disagg(), encode=["e"])
    assert_named(unused, "no decider splits", "not imported: encode", "own-decider")


@cases("kind, roles", {
    "prefill": ("prefill-filter", {"prefill", "encode-prefill", "prefill-decode"}),
    "encode": ("encode-filter", {"encode", "encode-prefill"}),
    "decode": ("decode-filter", {"decode", "prefill-decode", ""}),
})  # fmt: skip
def test_a_router_of_one_stage_sends_requests_to_the_endpoints_of_this_stage(
    kind: str, roles: set[str]
) -> None:
    result = imported(
        plugins=[{"type": kind}], schedulingProfiles=[{"name": "default", "plugins": [{"pluginRef": kind}]}]
    )
    listed = ("prefill", "encode-prefill", "prefill-decode", "encode", "decode", "")
    endpoints = tuple(Endpoint(role, {ROLE: role} if role else {}) for role in listed)
    found = with_stages(endpoints, parse(result.tree).scheduling.stages)
    assert {each.address for each in found if each.decodes} == roles
    assert not result.remarks


@cases("more, fault", {
    "no such detector": ({"saturationDetector": {"pluginRef": "x"}}, "no plugin is named 'x'"),
    "another kind": ({"kind": "Other"}, "kind must be"),
    "no list": ({"plugins": {}}, "plugins: must be a list"),
    "no type": ({"plugins": [{"name": "a"}]}, r"plugins\.0\.type: is missing"),
    "one name twice": ({"plugins": [{"type": "a"}, {"type": "a"}]}, "two plugins are named a"),
    "no such profile": ({"plugins": [disagg()], "schedulingProfiles": [{"name": "x"}]},
                        "no profile is named 'decode'"),
    "no such decider": ({"plugins": [disagg(prefill="x")]}, "no decider is named 'x'"),
    "no number of tokens": ({"plugins": [{"type": "pd-profile-handler", "parameters": {"threshold": "x"}}]},
                            "threshold: 'x' is no number"),
    "no such plugin": ({"plugins": [], "schedulingProfiles": [{"plugins": [{"pluginRef": "x"}]}]},
                       "no plugin is named"),
    **{f"a quantity {each}": ({"flowControl": {"maxRequests": each}},
                              r"flowControl\.maxRequests: .* is no quantity")
       for each in ("many", math.nan, math.inf, -5, True, [1])},
    **{f"a duration {each}": ({"flowControl": {"defaultRequestTTL": each}},
                              r"flowControl\.defaultRequestTTL: .* is no duration")
       for each in ("soon", "", "-1s", "1m30", math.nan, [30])},
    **{f"a priority {each}": ({"flowControl": {"priorityBands": [{"priority": each, "maxRequests": 1}]}},
                              r"flowControl\.priorityBands\.priority: .* is no int32")
       for each in ("high", 1.5, True, 2**31)},
    "one priority twice": ({"flowControl": {"priorityBands": [{"priority": 3}, {"priority": 3}]}},
                           r"flowControl\.priorityBands\.priority: 3 is given twice"),
    "no series": ({"plugins": [{"type": "core-metrics-extractor", "parameters": {"engineConfigs": [
                      {"name": "vllm", "kvUsageSpec": "two words"}]}}]},
                  "kv_utilisation of vllm: 'two words' is no name"),
    "no such engine": ({"plugins": [{"type": "core-metrics-extractor",
                                     "parameters": {"defaultEngine": "mine"}}]},
                       "defaultEngine: no engine is named 'mine'"),
    "no bytes": ({"flowControl": {"priorityBands": [{"maxBytes": "big"}]}},
                 r"priorityBands\.maxBytes: 'big' is no"),
})  # fmt: skip
def test_a_malformed_file_is_refused_with_the_key_at_fault(more: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        imported(**more)


def test_remarks_name_keys_that_are_not_strings_like_other_keys() -> None:
    scorer = {"type": "queue-scorer", "parameters": {1: 2, "a": 3}}
    remarks = import_config.imported({**HEAD, "plugins": [scorer], 5: "x", "strange": {}}).remarks  # type: ignore[dict-item]
    assert {"5 has no counterpart", "strange has no counterpart"} <= set(remarks)
    assert "plugins: parameters of queue-scorer (1, a) have no counterpart" in remarks


def test_the_import_prints_a_valid_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plugins.yaml"
    assert cli.main(["import-config", str(file)]) == 2
    assert capsys.readouterr().err == f"{file}: No such file or directory\n"
    file.write_text(yaml.safe_dump({**HEAD, "plugins": [{"type": "queue-scorer"}, {"type": "mystery"}]}))
    assert cli.main(["import-config", str(file)]) == 0
    out, err = capsys.readouterr()
    assert parse(yaml.safe_load(out)).scheduling.scorers["queue-depth"]
    assert "mystery" in err
    whole = file.read_text()
    file.write_text(yaml.safe_dump({"router": {"epp": {"pluginsCustomConfig": {"a.yaml": whole}}}}))
    assert cli.main(["import-config", str(file)]) == 0
    from_values = capsys.readouterr()
    assert from_values.out == out
    assert from_values.err == err + f"{file.name}: only the EndpointPickerConfig in it is imported\n"
    for text in (whole.replace("kind: ", "kind:   "), json.dumps(yaml.safe_load(whole))):
        file.write_text(yaml.safe_dump({"router": {"epp": {"pluginsCustomConfig": {"a.yaml": text}}}}))
        assert cli.main(["import-config", str(file)]) == 0
        assert capsys.readouterr() == from_values
    file.write_text("configs: &again [*again, {kind: EndpointPickerConfig}, {kind: EndpointPickerConfig}]")
    assert cli.main(["import-config", str(file)]) == 2
    assert "import an EndpointPickerConfig alone" in capsys.readouterr().err
    assert cli.main(["import-config", str(tmp_path / "absent")]) == 2


def test_the_migration_page_names_every_plugin_that_is_imported() -> None:
    named = set(re.findall(r"`([a-z-]+)`", PAGE.read_text()))
    assert named >= {*import_config.SCORERS, *import_config.BUILT_IN}
