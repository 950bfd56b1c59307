"""Configuration: the documented example, faults, environment variables, and `picker check`."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from picker_fleet import cli
from picker_fleet.domain.bands import Band
from picker_fleet.domain.config import Settings, load, parse
from picker_fleet.domain.errors import ConfigError
from picker_fleet.domain.sections import Tls

# All keys of the configuration as specified.
WHOLE = """
pool: default
redis: {url: redis://127.0.0.1:6379/0}
extproc: {listen: 0.0.0.0:9002}
admin: {listen: 0.0.0.0:8081, token: null}
discovery: {static: [{address: 10.0.0.1:8000, labels: {}}]}
models: [{name: llama, criticality: Default, weight: 1.0, max_inflight_per_endpoint: null,
          target_models: [{name: llama-v2, weight: 100}]}]
objectives: [{name: premium, criticality: Critical, weight: 3.0}]
fair_request_queue: {total_capacity: 1000, flow_capacity: 100, queue_ttl: 30s, flow_key: fairness-id,
                     band_policy: strict, band_weights: {Critical: 70, Default: 20, Sheddable: 10},
                     fairness: weighted-fair, ordering: fcfs, overload: preempt, starvation_after: null,
                     guard_share: 0.1, overload_status: 503}
request_queue_controller: {watermark_per_backend: 2, percentage_deviation_for_bounds: 0.1,
                           lower_bound_per_backend: null, upper_bound_per_backend: null, unit: requests,
                           expiry_cleanup_interval: 1s}
workloads: {wait_weight: 0.4, criticality_weight: 0.4, rate_weight: 0.2, wait_cap: 60s, rate_cap: 100,
            rate_window: 60s, ema_alpha: 0.2, idle_after: 5m, wait_signal: request}
scheduling: {scorers: [{name: queue-depth, weight: 2}, {name: kv-cache, weight: 2},
                       {name: lora-affinity, weight: 3}], fallbacks: 2}
scraping: {interval: auto, stale_after: auto, engine: auto}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "picker.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def fault(tree: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(tree)
    return str(caught.value)


def test_the_documented_example_configuration_is_valid_and_has_the_defaults(tmp_path: Path) -> None:
    settings, defaults = load(written(tmp_path, WHOLE), {}), Settings()
    assert settings.models[0].target_models[0].name == "llama-v2"
    assert settings.objectives[0].criticality == "Critical"
    assert settings.workloads.idle_after == 300
    assert settings.scraping.interval is None
    assert settings.request_queue_controller.upper_per_backend == pytest.approx(2.2)
    sections = ("redis", "extproc", "admin", "fair_request_queue", "request_queue_controller", "workloads")
    for section in (*sections, "scraping"):
        assert getattr(settings, section) == getattr(defaults, section)


def test_the_shipped_example_configuration_is_valid() -> None:
    assert load(Path(__file__).parents[2] / "deploy" / "picker.yaml", {}).scheduling.scorers


def test_bands_have_names_and_default_weights_in_json() -> None:
    weights = parse({"fair_request_queue": {"band_weights": {"critical": 5}}}).fair_request_queue
    assert list(weights.bands) == [replace(Band.CRITICAL, weight=5), Band.DEFAULT, Band.SHEDDABLE]
    dump = weights.model_dump(mode="json")
    assert dump["band_weights"] == {"Critical": 5, "Default": 20, "Sheddable": 10}


def test_bands_of_other_priorities_inherit_missing_fields_from_the_nearest_named_band() -> None:
    queue = parse({"fair_request_queue": {
        "priority_bands": [
            {"priority": 50, "name": "critical", "weight": 80},
            {"priority": 100, "name": "urgent"},
            {"priority": 7, "guaranteed": True, "capacity": 3, "bytes": 10**9},
            {"priority": -(2**31), "name": "batch", "weight": 1, "preemptible": True},
        ],
        "band_weights": {"batch": 2},
    }}).fair_request_queue  # fmt: skip
    critical = replace(Band.CRITICAL, priority=50, weight=80)
    assert list(queue.bands) == [
        replace(critical, priority=100, name="urgent"),
        critical,
        replace(Band.DEFAULT, priority=7, name="7", guaranteed=True, capacity=3, bytes=10**9),
        Band.DEFAULT,
        Band.SHEDDABLE,
        replace(Band.SHEDDABLE, priority=-(2**31), name="batch", weight=2),
    ]


BAD_BANDS: list[tuple[list[dict[str, Any]], str]] = [
    ([{"priority": 2**31}], "priority_bands.0.priority"),
    ([{"priority": "7"}], "priority_bands.0.priority"),
    ([{"priority": 7, "bytes": 0}], "priority_bands.0.bytes"),
    ([{"priority": 7, "bytes": "1Mi"}], "priority_bands.0.bytes"),
    ([{"priority": 7, "megabytes": 1}], "priority_bands.0.megabytes"),
    ([{"priority": 0}], "priority 0 is given to two bands"),
    ([{"priority": 1, "name": "x"}, {"priority": 2, "name": "x"}], "a name is given to two bands"),
    ([{"priority": 1, "name": "-7"}], "the name -7 spells another priority"),
    ([{"priority": each} for each in range(100, 170)], "priority_bands"),
]


@pytest.mark.parametrize(("bands", "says"), BAD_BANDS)
def test_the_error_for_invalid_bands_names_the_fault(bands: list[dict[str, Any]], says: str) -> None:
    assert says in fault({"fair_request_queue": {"priority_bands": bands}})


def test_a_model_or_an_objective_may_have_a_criticality_or_a_priority_but_not_both() -> None:
    settings = parse({"models": [{"name": "m", "priority": -3}], "objectives": [{"name": "o"}]})
    bands = settings.fair_request_queue.bands
    assert settings.models[0].band(bands).name == "-3"
    assert settings.objectives[0].band(bands) is bands.of(0)
    both = {"name": "o", "priority": 10, "criticality": "Critical"}
    assert "give criticality or priority, not both" in fault({"objectives": [both]})


def test_with_unit_tokens_bounds_are_in_tokens_and_a_static_pool_requires_a_watermark() -> None:
    settings = parse({"request_queue_controller": {"unit": "tokens", "watermark_per_backend": 8000}})
    assert settings.request_queue_controller.upper_per_backend == pytest.approx(8800)
    assert settings.fair_request_queue.default_answer_tokens == 256
    found = parse({"request_queue_controller": {"unit": "tokens"}})
    assert found.request_queue_controller.is_adaptive
    assert found.request_queue_controller.upper_per_backend == 4096
    assert found.claim_share == 0.25  # a limit in tokens counts a request's cost, not each request as 1
    message = fault({"request_queue_controller": {"unit": "tokens", "mode": "static"}})
    assert message.startswith("request_queue_controller: unit tokens needs watermark_per_backend")
    assert "in tokens" in message


def critical(count: int) -> list[dict[str, object]]:
    return [{"name": f"m{number}", "criticality": "Critical"} for number in range(count)]


def test_critical_guarantees_above_the_capacity_are_refused_as_err_too_many_flows() -> None:
    # Three critical flows fit into the capacity; a fourth does not.
    queue = {"total_capacity": 300, "flow_capacity": 100}
    assert len(parse({"models": critical(3), "fair_request_queue": queue}).models) == 3
    message = fault({"models": critical(4), "fair_request_queue": queue})
    says = r"configuration: ErrTooManyFlows: 4 Critical models.*400 places.*total_capacity is 300"
    assert re.match(says, message)


def test_the_error_for_a_flow_limit_without_fairness_names_the_model() -> None:
    models = [{"name": "a"}, {"name": "b", "max_inflight_per_endpoint": 4}]
    assert parse({"models": models}).models[1].max_inflight_per_endpoint == 4
    message = fault({"models": models, "fair_request_queue": {"fairness": "none"}})
    assert "fair_request_queue.fairness none" in message
    assert "models b " in message


# Invalid values of each key. The message of the fault begins with the key.
WRONG: dict[str, list[Any]] = {
    "fair_request_queue.total_capacity": [True, "5", 5.5, 0, 10**30],
    "fair_request_queue.queue_ttl": ["soon", True, "0s", float("nan"), 10**400],
    "fair_request_queue.overload_status": [500],
    "fair_request_queue.ordering": ["lifo"],
    "fair_request_queue.band_policy": ["fair"],
    "fair_request_queue.guard_share": [1],
    "fair_request_queue.claim_share": [0, 1.5],
    "fair_request_queue.max_flows": [0],
    "fair_request_queue.default_answer_tokens": [0],
    "fair_request_queue.band_weights.Default": [0],
    "fair_request_queue.band_weights": [{"Urgent": 1}],
    "request_queue_controller.watermark_per_backend": [float("inf")],
    "request_queue_controller.unit": ["bytes"],
    "workloads.ema_alpha": [2],
    "decision_log.enabled": ["yes"],
    "models.0.name": ["a\x1fb"],
    "models.0.criticality": ["Urgent"],
    "models.0.max_inflight_per_endpoint": [0, 65_536],
    "objectives.0.name": ["a\x00b"],
    "objectives.0.max_inflight_per_endpoint": [0],
    "discovery.static.0.max_inflight": [0],
    "discovery.static.0.address": ["[fe80::1%a\x1fb]:1", "model:8000", "10.0.0.1:0", "::1:80"],
    "discovery.static": [[{"address": "[::1]:80"}, {"address": "[0::1]:80"}]],
    "discovery.file": [""],
    "admin.token": ["two words", "\u0442\u0430\u0439\u043d\u0430", " \n"],
    "admin.hosts.0": ["picker:8081", "http://picker", "*", "*.", "a..b", "", "a b", 7],
    "scheduling.scorers.luck": [1],
    "scheduling.scorers.random": ["3", 0, True, None],
    "scheduling.scorers": [5, ["random"], [{"weight": 2}], [{"name": "random", "wait": 2}],
                           [{"name": "random"}, {"name": "random"}]],
    "scheduling.stages.prefill.selector": ["", "a in b", 7],
    "scheduling.stages.decode.scorers.luck": [1],
    "scheduling.stages.encode.header": ["x-encoder-own", "x-envoy-a", ":path", "x-kv-cache-source-host-port"],
    "scheduling.stages.encode.selector": [""],
    "scheduling.stages.threshold": ["soon", -1, 0.5, True],
    "scheduling.stages.header": ["x-gateway-destination-endpoint", "authorization", "x-a b", "", 7],
    "scheduling.latency.alpha": [-1],
    "scheduling.latency.beta": ["high"],
    "scheduling.latency.gamma": [float("inf")],
    "scraping.interval": ["often"],
    "extproc.listen": ["9002", "0.0.0.0:99999", "a..b:9002"],
    "extproc.metadata_namespace": ["picker", "envoy.lb.subset_hint", "", "a:b", "a)%", "two words"],
    "extproc.paths.0": [
        "/v1/classify", "put /v1/x", "POST v1/x", "POST //", "POST /v1//x", "POST /v1/../x", "POST /a/%2e",
        "POST /a%2fb", 7,
    ],
    "extproc.trusted_headers.0": ["x-gateway-destination-endpoint", "x-request-id", "", 7],
    "tracing.endpoint": ["collector:4317"],
    "tracing.sample": [2, -0.1],
    "tracing.enabled": ["perhaps"],
    "pool": ["a b", "a\n"],
    "redis": [None],
}  # fmt: skip
REQUIRED = {"models": {"name": "a"}, "objectives": {"name": "a"}, "discovery": {"address": "10.0.0.1:80"}}


def tree_of(key: str, value: object) -> dict[str, object]:
    """A configuration in which `key` has `value`; entries of lists also have all required keys."""
    first, *parts = key.split(".")
    for part in reversed(parts):
        entry = {**REQUIRED.get(first, {}), **value} if isinstance(value, dict) else value
        value = [entry] if part == "0" else {part: value}
    return {first: value}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in WRONG for value in WRONG[key]])
def test_a_wrong_value_is_reported_in_one_line_that_names_the_key(key: str, value: object) -> None:
    message = fault(tree_of(key, value))
    assert re.match(rf"{re.escape(key)}(\.\[key\])?: ", message)
    assert "\n" not in message


UNFITTING: list[tuple[dict[str, object], str]] = [
    ({"fair_request_queue": {"total_capacity": 5, "flow_capacity": 6}}, "fair_request_queue"),
    ({"fair_request_queue": {"starvation_after": "31s"}}, "fair_request_queue"),
    ({"request_queue_controller": {"upper_bound_per_backend": 1}}, "request_queue_controller"),
    ({"request_queue_controller": {"lower_bound_per_backend": 3}}, "request_queue_controller"),
    ({"models": [{"name": "a"}, {"name": "a"}]}, "configuration"),
    ({"scheduling": {"latency": {"alpha": 0, "beta": 0, "gamma": 0}}}, "scheduling.latency"),
    ({"scraping": {"interval": "1s", "stale_after": "10ms"}}, "scraping"),
    ({"scraping": {"engine": "own"}}, "scraping"),
    ({"scraping": {"series": {"mood": "vllm:mood"}}}, "scraping"),
    ({"discovery": {"static": [], "file": "x"}}, "discovery"),
    ({"extproc": {"listen": "0.0.0.0:8081"}}, "configuration"),
    ({"http": {"listen": "0.0.0.0:9002"}}, "configuration"),
    ({"extproc": {"health_listen": "0.0.0.0:8081"}}, "configuration"),
    ({"pool": "a", "pools": {"a": {"listen": "h:1"}, "b": {"listen": "h:1"}}}, "configuration"),
    ({"extproc": {"max_body_bytes": 4096, "max_buffered_bytes": 2048}}, "extproc"),
]


@pytest.mark.parametrize(("tree", "where"), UNFITTING)
def test_contradictory_values_are_reported_in_one_line_that_names_the_section(
    tree: dict[str, object], where: str
) -> None:
    message = fault(tree)
    assert message.startswith(f"{where}: ")
    assert "\n" not in message


def test_the_configuration_takes_scorers_as_a_list_or_as_a_mapping() -> None:
    listed = [{"name": "kv-cache"}, {"name": "random", "weight": 2}]
    for form in (listed, {"kv-cache": 1, "random": 2}):
        assert parse({"scheduling": {"scorers": form}}).scheduling.scorers == {"kv-cache": 1, "random": 2}


def test_each_fault_has_one_line_that_lists_the_valid_values() -> None:
    valid = "unknown key; valid here:"
    message = fault({"fair_request_queue": {"capacity": 3}})
    assert message.startswith(f"fair_request_queue.capacity: {valid} total_capacity,")
    message = fault({"scheduling": {"latency": {"delta": 1}}})
    assert message == f"scheduling.latency.delta: {valid} alpha, beta, gamma"
    message = fault({"discovery": {"static": ["10.0.0.1:8000"]}})
    assert message.startswith("discovery.static.0: must be a mapping; valid here: address, labels,")
    message = fault({"scheduling": {"scorers": {"nope": 1}}})
    assert message.startswith("scheduling.scorers.nope: no scorer is named 'nope'; valid: queue-depth,")
    assert "no method and path" in fault({"extproc": {"paths": ["/v1/x"]}})
    # `redis.silence` must be shorter than a lease.
    assert re.search(r"redis\.silence 8s.*leases\.inflight 15s", fault({"redis": {"silence": "8s"}}))
    lines = fault({"pool": "", "redis": {"url": "http://x"}, "nonsense": 1}).splitlines()
    assert [line.split(":")[0] for line in lines] == ["pool", "redis.url", "nonsense"]
    selector = fault({"scheduling": {"stages": {"prefill": {"selector": "role=prefill,tier in fast"}}}})
    assert selector.startswith(
        "scheduling.stages.prefill.selector: no label selector at 'tier in fast': write a=b, "
    )
    threshold = fault({"scheduling": {"stages": {"threshold": "Auto"}}})
    assert threshold == "scheduling.stages.threshold: must be auto or a whole number (got 'Auto')"
    same = fault({"scheduling": {"stages": {"header": "x-own", "encode": {"header": "X-Own"}}}})
    assert same == "scheduling.stages: header and encode.header are both x-own; use two names"
    trusted = fault(
        {"scheduling": {"stages": {"header": "x-own"}}, "extproc": {"trusted_headers": ["X-Own"]}}
    )
    assert trusted.endswith("scheduling.stages: extproc.trusted_headers names x-own, too; use another name")
    headers = fault({"extproc": {"trusted_headers": ["x-gateway-destination-endpoint", "x-request-id"]}})
    assert ["is never taken from a client" in line for line in headers.splitlines()] == [True, False]
    assert ["is not a steering header" in line for line in headers.splitlines()] == [False, True]
    assert headers.count("valid: x-gateway-inference-fairness-id") == 2
    assert "is no method and path" in fault({"extproc": {"paths": ["/v1/classify"]}})
    sizes = {"max_body_bytes": 4096, "max_buffered_bytes": 2048}
    assert "max_body_bytes 4096 exceeds max_buffered_bytes 2048" in fault({"extproc": sizes})


def tenfold(form: str) -> str:
    """A document of 40 lines, each of which repeats the line before ten times, in the form `form`."""
    names = [f"v{number}" for number in range(40)]
    more = (f"{name}: &{name} {form.format(', '.join([f'*{last}'] * 10))}" for last, name in pairwise(names))
    return "\n".join((f"{names[0]}: &{names[0]} {{a: 1}}", *more))


BROKEN = [
    (None, "cannot be read"),
    ("pool: [", "is not YAML"),
    ("- a\n- b", "top level must be a mapping"),
    ("pool: a\npool: b", "'pool' is there twice"),
    ("[" * 300_000, "is nested too deeply"),
    ("pool: 2026-99-99", "is not YAML"),
    ("pool: a\0", "forbidden character at position 7"),
    (tenfold("[{}]"), "aliases repeat more than 100000 values in line 6"),
    (tenfold("{{<<: [{}]}}"), "aliases repeat more than 100000 values in line 6"),
    ("pool: " + "1:" * 100_000 + "1", "a number has more than 400 characters in line 1"),
    ("extproc: {max_body_bytes: 0x" + "f" * 5000 + "}", "a number has more than 400 characters in line 1"),
]


@pytest.mark.parametrize(("text", "needle"), BROKEN)
def test_the_error_names_a_missing_or_broken_config_file(
    tmp_path: Path, text: str | None, needle: str
) -> None:
    path = tmp_path / "picker.yaml" if text is None else written(tmp_path, text)
    with pytest.raises(ConfigError, match=r"picker\.yaml") as caught:
        load(path, {})
    assert needle in str(caught.value)
    assert "\n" not in str(caught.value)


SECRET = "hunter2"
REPEATING: list[tuple[str, dict[str, str]]] = [
    (f"redis: {{url: 'redis://:{SECRET}@h:x'}}", {}),
    (f"redis: {{url: 'redis://:a/{SECRET}@h:1'}}", {}),
    (f"redis: {{url: 'redis://:a?{SECRET}@h:1'}}", {}),
    (f"redis: {{url: 'redis://:{SECRET}\u2100@h:1'}}", {}),
    (f"redis: 'redis://:{SECRET}@h:1'", {}),
    (f"redis: ['redis://:{SECRET}@h:1']", {}),
    (f"admin: {SECRET}", {}),
    (f"admin: {{token: '{SECRET} x'}}", {}),
    (f"admin: {{token: '{SECRET}", {}),
    (f"admin: {{token: *{SECRET}}}", {}),
    (f"admin: {{tokens: {SECRET}}}", {}),
    (f"tracing: {{endpoint: 'ftp://u:{SECRET}@h/?key={SECRET}'}}", {}),
    (f"tracing: {{endpoint: 'u:{SECRET}@h:4318'}}", {}),
    ("", {"PICKER_ADMIN": f"{{token: {SECRET}"}),
    ("", {"PICKER_REDIS__URL": f"rediss://:{SECRET}@["}),
]


@pytest.mark.parametrize(("text", "variables"), REPEATING, ids=str)
def test_a_configuration_error_shows_no_secret(tmp_path: Path, text: str, variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, text), variables)
    assert SECRET not in str(caught.value)
    assert re.search("redis|admin|tracing|PICKER|line 1", str(caught.value))


def test_relative_files_are_relative_to_the_configuration(tmp_path: Path) -> None:
    tree = """
        discovery: {file: endpoints.yaml}
        admin: {tokens: [{file: alice, role: viewer}], tls: {cert: a.crt, key: a.key}}
    """
    settings = load(written(tmp_path, tree), {})
    assert settings.discovery.file == tmp_path / "endpoints.yaml"
    assert settings.admin.tokens[0].file == tmp_path / "alice"
    assert settings.admin.tls == Tls(cert=tmp_path / "a.crt", key=tmp_path / "a.key")


def test_environment_variables_override_the_configuration_file(tmp_path: Path) -> None:
    path = written(tmp_path, "pool: one\nredis: {url: redis://a:1}\nadmin:\n")
    variables = {
        "PICKER_REDIS__URL": "redis://b:2",
        "PICKER_ADMIN__TOKEN": "123456\n",  # stays a string, although YAML would read a number
        "PICKER_FAIR_REQUEST_QUEUE__QUEUE_TTL": "5s",
        "PICKER_MODELS": "[{name: llama}]",
        "PATH": "/bin",
    }
    settings = load(path, variables)
    assert (settings.pool, settings.redis.url) == ("one", "redis://b:2")
    assert settings.admin.token == "123456"
    assert settings.fair_request_queue.queue_ttl == 5
    assert settings.models[0].name == "llama"


def test_the_admin_token_is_read_from_a_file_such_as_a_mounted_secret(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("open-sesame\n")
    (tmp_path / "empty").write_text("\n")
    path = written(tmp_path, "admin: {token_file: token}")
    variable = {"PICKER_ADMIN__TOKEN_FILE": str(tmp_path / "empty")}
    assert load(path, {}).admin.token == "open-sesame"
    assert load(path, variable).admin.token is None
    assert load(path, {"PICKER_ADMIN__TOKEN": "another"}).admin.token == "another"


@pytest.mark.parametrize(("text", "fault"), [(None, "cannot be read"), ("two words", "visible ASCII")])
def test_the_error_names_a_token_file_without_a_token(tmp_path: Path, text: str | None, fault: str) -> None:
    if text is not None:
        (tmp_path / "token").write_text(text)
    with pytest.raises(ConfigError, match=rf"^admin\.token.*{fault}"):
        load(written(tmp_path, "admin: {token_file: token}"), {})


WRONG_VARIABLES = [
    *((name, "x") for name in ("PICKER_REDIS__ADDRESS", "PICKER_NO__SENSE", "PICKER_POOL__NAME")),
    *(("PICKER_SCHEDULING__FALLBACKS", value) for value in ("many", "[1")),
]


@pytest.mark.parametrize(("name", "value"), WRONG_VARIABLES)
def test_the_error_names_a_wrong_environment_variable(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, "pool: one"), {name: value})
    assert str(caught.value).startswith(f"{name}: ")


def test_environment_variables_of_kubernetes_services_are_ignored() -> None:
    links = {
        "PICKER_PORT": "tcp://10.0.0.9:9002",
        "PICKER_SERVICE_HOST": "10.0.0.9",
        "PICKER_SERVICE_PORT_GRPC": "9002",
        "PICKER_FLEET_PORT_9002_TCP_ADDR": "10.0.0.9",
    }
    assert load(None, links) == Settings()
    # A variable named like a Kubernetes variable still counts if it names a configuration key.
    dns = load(None, {"PICKER_DISCOVERY__DNS__NAME": "servers", "PICKER_DISCOVERY__DNS__PORT": "9000"})
    assert dns.discovery.dns is not None
    assert dns.discovery.dns.port == 9000


def test_a_tls_certificate_without_a_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"extproc\.tls: .*belong together"):
        parse({"extproc": {"tls": {"cert": "a"}}})
    assert parse({"extproc": {"tls": {}}}).extproc.tls == Tls()
    text = "extproc: {tls: {cert: a, key: /b}}\nhttp: {tls: {client_ca: c}}\n"
    found = load(written(tmp_path, text), {})
    assert found.extproc.tls == Tls(cert=tmp_path / "a", key=Path("/b"))
    assert found.http.tls == Tls(client_ca=tmp_path / "c")


def test_picker_check_prints_a_summary_of_a_valid_file_or_a_line_for_each_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, WHOLE)
    assert cli.main(["check", str(path)]) == 0
    out = capsys.readouterr()
    assert out.out.startswith(f"{path}: valid\n")
    assert "endpoints: static, 1 listed" in out.out
    assert "lower 1.8, watermark 2, upper 2.2" in out.out
    roles = ("decode", "prefill-decode", "prefill", "encode", "Prefill")
    listed = [
        {"address": f"10.0.0.{n}:80", "labels": {"llm-d.ai/role": role}} for n, role in enumerate(roles)
    ]
    written(tmp_path, json.dumps({"discovery": {"static": listed}}))
    assert cli.main(["check", str(path)]) == 0
    told = "5 listed: 2 decode, 2 prefill, 1 encode, 1 get no requests\n"
    assert f"endpoints: static, {told}" in capsys.readouterr().out
    assert "static, since it names watermark_per_backend, percentage_deviation_for_bounds; remove" in out.out
    assert out.err == ""
    written(tmp_path, "request_queue_controller: {max_per_backend: 3}")
    assert cli.main(["check", str(path)]) == 0
    assert "found by the fleet, 3 requests each at first\n  queue" in capsys.readouterr().out
    for given, told in (
        ("mode: adaptive, watermark_per_backend: 4", "watermark_per_backend"),
        ("mode: static, max_per_backend: 4, pinned: {'10.0.0.1:80': 2}", "max_per_backend, pinned"),
    ):
        written(tmp_path, f"request_queue_controller: {{{given}}}")
        assert cli.main(["check", str(path)]) == 0
        assert f"without effect in this mode: {told}\n" in capsys.readouterr().out
    for given, told in (
        ("extproc: {trusted_headers: [x-llm-d-inference-fairness-id]}\ntenants: {}", "by the fairness id"),
        ("extproc: {trusted_headers: [x-org]}\ntenants: {headers: [x-org]}", "by x-org"),
        ("tenants: {}", "only by models, since extproc.trusted_headers lacks the fairness id"),
    ):
        written(tmp_path, given)
        assert cli.main(["check", str(path)]) == 0
        assert capsys.readouterr().out.endswith(f"\n  tenants: named {told}\n")
    written(tmp_path, "nonsense: 1\nextproc: {max_body_bytes: 1}\ntenants: {nodes: {}}")
    assert cli.main(["check", str(path)]) == 2
    out = capsys.readouterr()
    assert (out.out, len(out.err.splitlines())) == ("", 3)
    assert "tenants.nodes: Input should be a valid list\n" in out.err
    nodes = tmp_path / "nodes.yaml"
    nodes.write_text("- {path: acme, weight: 0}")
    written(tmp_path, "tenants: {file: nodes.yaml}\ndiscovery: {file: endpoints.yaml}")
    assert cli.main(["check", str(path)]) == 2
    missing, wrong = capsys.readouterr().err.splitlines()
    assert missing == f"endpoints file {tmp_path}/endpoints.yaml: cannot be read: No such file or directory"
    assert wrong.startswith(f"tenants file {nodes}: tenants.nodes.0 (acme).weight: ")
