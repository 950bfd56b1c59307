"""Configuration: the documented example, clear faults, the environment's overlay, and `picker check`."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker_fleet import cli
from picker_fleet.config import Settings, load, parse
from picker_fleet.errors import ConfigError
from picker_fleet.request import Band

# The configuration of the contract, key for key.
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
scraping: {interval: auto, stale_after: auto, engine: vllm}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "picker.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def fault(tree: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(tree)
    return str(caught.value)


def test_the_documented_example_is_valid(tmp_path: Path) -> None:
    settings = load(written(tmp_path, WHOLE), {})
    assert settings.models[0].target_models[0].name == "llama-v2"
    assert settings.objectives[0].criticality is Band.CRITICAL
    assert settings.workloads.idle_after == 300
    assert settings.scraping.interval is None
    assert settings.request_queue_controller.upper_per_backend == pytest.approx(2.2)


def test_the_documented_example_has_the_defaults(tmp_path: Path) -> None:
    settings, defaults = load(written(tmp_path, WHOLE), {}), Settings()
    for section in ("redis", "extproc", "admin", "fair_request_queue", "request_queue_controller"):
        assert getattr(settings, section) == getattr(defaults, section)
    assert settings.workloads == defaults.workloads
    assert settings.scraping == defaults.scraping


def test_the_shipped_example_is_valid() -> None:
    assert load(Path(__file__).parents[2] / "deploy" / "picker.yaml", {}).scheduling.scorers


def test_a_custom_engine_is_valid_if_its_series_are_named() -> None:
    scraping = {"engine": "own", "series": {"waiting": "own_queue", "path": "/stats"}}
    assert parse({"scraping": scraping}).scraping.series == scraping["series"]


def test_a_redis_url_that_is_incomplete_names_what_is_missing() -> None:
    message = fault({"redis": {"url": "redis+sentinel://:hunter2@h:1"}})
    assert message.startswith("redis.url: the path must name the service")
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("band_policy", ("strict", "weighted")),
        ("fairness", ("weighted-fair", "round-robin", "none")),
        ("ordering", ("fcfs", "edf", "workload-aware")),
        ("overload", ("preempt", "reject-noncritical")),
    ],
)
def test_every_policy_is_accepted(key: str, values: tuple[str, ...]) -> None:
    for value in values:
        assert getattr(parse({"fair_request_queue": {key: value}}).fair_request_queue, key) == value


def test_bands_without_a_weight_keep_their_default() -> None:
    weights = parse({"fair_request_queue": {"band_weights": {"critical": 5}}}).fair_request_queue.band_weights
    assert weights == {Band.CRITICAL: 5, Band.DEFAULT: 20, Band.SHEDDABLE: 10}


def test_bands_have_their_names_in_json() -> None:
    dump = Settings().model_dump(mode="json")
    assert dump["fair_request_queue"]["band_weights"] == {"Critical": 70, "Default": 20, "Sheddable": 10}


def test_unit_tokens_has_bounds_in_tokens() -> None:
    settings = parse({"request_queue_controller": {"unit": "tokens", "watermark_per_backend": 8000}})
    assert settings.request_queue_controller.upper_per_backend == pytest.approx(8800)
    assert settings.fair_request_queue.default_answer_tokens == 256


def test_unit_tokens_without_a_watermark_is_refused() -> None:
    message = fault({"request_queue_controller": {"unit": "tokens"}})
    assert message.startswith("request_queue_controller: unit tokens needs watermark_per_backend")
    assert "in tokens" in message


def critical(count: int) -> list[dict[str, object]]:
    return [{"name": f"m{number}", "criticality": "Critical"} for number in range(count)]


def test_critical_guarantees_above_the_capacity_are_err_too_many_flows() -> None:
    # Ten critical flows fit; an eleventh does not.
    queue = {"total_capacity": 300, "flow_capacity": 100}
    assert len(parse({"models": critical(3), "fair_request_queue": queue}).models) == 3
    message = fault({"models": critical(4), "fair_request_queue": queue})
    assert message.startswith("configuration: ErrTooManyFlows: 4 Critical models")
    assert "400 places" in message
    assert "total_capacity is 300" in message


def test_a_limit_of_a_flow_without_flows_names_the_model() -> None:
    models = [{"name": "a"}, {"name": "b", "max_inflight_per_endpoint": 4}]
    assert parse({"models": models}).models[1].max_inflight_per_endpoint == 4
    message = fault({"models": models, "fair_request_queue": {"fairness": "none"}})
    assert "fair_request_queue.fairness none" in message
    assert "models b " in message


@pytest.mark.parametrize(
    ("tree", "where"),
    [
        ({"fair_request_queue": {"total_capacity": True}}, "fair_request_queue.total_capacity"),
        ({"fair_request_queue": {"total_capacity": "5"}}, "fair_request_queue.total_capacity"),
        ({"fair_request_queue": {"total_capacity": 5.5}}, "fair_request_queue.total_capacity"),
        ({"fair_request_queue": {"total_capacity": 0}}, "fair_request_queue.total_capacity"),
        ({"fair_request_queue": {"total_capacity": 10**30}}, "fair_request_queue.total_capacity"),
        ({"fair_request_queue": {"total_capacity": 5, "flow_capacity": 6}}, "fair_request_queue"),
        ({"fair_request_queue": {"queue_ttl": "soon"}}, "fair_request_queue.queue_ttl"),
        ({"fair_request_queue": {"queue_ttl": True}}, "fair_request_queue.queue_ttl"),
        ({"fair_request_queue": {"queue_ttl": "0s"}}, "fair_request_queue.queue_ttl"),
        ({"fair_request_queue": {"queue_ttl": float("nan")}}, "fair_request_queue.queue_ttl"),
        ({"fair_request_queue": {"queue_ttl": 10**400}}, "fair_request_queue.queue_ttl"),
        ({"fair_request_queue": {"overload_status": 500}}, "fair_request_queue.overload_status"),
        ({"fair_request_queue": {"ordering": "lifo"}}, "fair_request_queue.ordering"),
        ({"fair_request_queue": {"guard_share": 1}}, "fair_request_queue.guard_share"),
        ({"fair_request_queue": {"claim_share": 0}}, "fair_request_queue.claim_share"),
        ({"fair_request_queue": {"claim_share": 1.5}}, "fair_request_queue.claim_share"),
        ({"fair_request_queue": {"max_flows": 0}}, "fair_request_queue.max_flows"),
        ({"fair_request_queue": {"starvation_after": "31s"}}, "fair_request_queue"),
        (
            {"request_queue_controller": {"watermark_per_backend": float("inf")}},
            "request_queue_controller.watermark_per_backend",
        ),
        ({"request_queue_controller": {"upper_bound_per_backend": 1}}, "request_queue_controller"),
        ({"request_queue_controller": {"lower_bound_per_backend": 3}}, "request_queue_controller"),
        ({"workloads": {"ema_alpha": 2}}, "workloads.ema_alpha"),
        ({"decision_log": {"enabled": "yes"}}, "decision_log.enabled"),
        ({"models": [{"name": "a"}, {"name": "a"}]}, "configuration"),
        (
            {"models": [{"name": "a", "max_inflight_per_endpoint": 0}]},
            "models.0.max_inflight_per_endpoint",
        ),
        (
            {"discovery": {"static": [{"address": "10.0.0.1:80", "max_inflight": 0}]}},
            "discovery.static.0.max_inflight",
        ),
        (
            {"objectives": [{"name": "a", "max_inflight_per_endpoint": 0}]},
            "objectives.0.max_inflight_per_endpoint",
        ),
        (
            {"models": [{"name": "a", "max_inflight_per_endpoint": 65_536}]},
            "models.0.max_inflight_per_endpoint",
        ),
        (
            {"fair_request_queue": {"band_weights": {"Urgent": 1}}},
            "fair_request_queue.band_weights.Urgent.[key]",
        ),
        ({"models": [{"name": "a\x1fb"}]}, "models.0.name"),
        ({"objectives": [{"name": "a\x00b"}]}, "objectives.0.name"),
        ({"discovery": {"static": [{"address": "[fe80::1%a\x1fb]:1"}]}}, "discovery.static.0.address"),
        ({"fair_request_queue": {"band_weights": {"Default": 0}}}, "fair_request_queue.band_weights.Default"),
        ({"fair_request_queue": {"band_policy": "fair"}}, "fair_request_queue.band_policy"),
        ({"admin": {"token": "two words"}}, "admin.token"),
        ({"admin": {"token": "\u0442\u0430\u0439\u043d\u0430"}}, "admin.token"),
        ({"admin": {"token": " \n"}}, "admin.token"),
        ({"fair_request_queue": {"default_answer_tokens": 0}}, "fair_request_queue.default_answer_tokens"),
        ({"request_queue_controller": {"unit": "bytes"}}, "request_queue_controller.unit"),
        ({"models": [{"name": "a", "criticality": "Urgent"}]}, "models.0.criticality"),
        ({"scheduling": {"scorers": [{"name": "luck"}]}}, "scheduling.scorers.0.name"),
        ({"scheduling": {"scorers": [{"name": "random"}, {"name": "random"}]}}, "scheduling"),
        ({"scraping": {"interval": "1s", "stale_after": "10ms"}}, "scraping"),
        ({"scraping": {"interval": "often"}}, "scraping.interval"),
        ({"scraping": {"engine": "own"}}, "scraping"),
        ({"scraping": {"series": {"mood": "vllm:mood"}}}, "scraping"),
        ({"discovery": {"static": [{"address": "model:8000"}]}}, "discovery.static.0.address"),
        ({"discovery": {"static": [{"address": "10.0.0.1:0"}]}}, "discovery.static.0.address"),
        ({"discovery": {"static": [{"address": "::1:80"}]}}, "discovery.static.0.address"),
        ({"discovery": {"static": [{"address": "[::1]:80"}, {"address": "[0::1]:80"}]}}, "discovery.static"),
        ({"discovery": {"static": [], "file": "x"}}, "discovery"),
        ({"discovery": {"file": ""}}, "discovery.file"),
        ({"extproc": {"listen": "9002"}}, "extproc.listen"),
        ({"extproc": {"listen": "0.0.0.0:99999"}}, "extproc.listen"),
        ({"extproc": {"listen": "0.0.0.0:8081"}}, "configuration"),
        ({"pool": "a b"}, "pool"),
        ({"pool": "a\n"}, "pool"),
        ({"redis": None}, "redis"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_its_key(tree: dict[str, object], where: str) -> None:
    message = fault(tree)
    assert message.startswith(f"{where}: ")
    assert "\n" not in message


def test_an_unknown_key_lists_the_valid_ones() -> None:
    message = fault({"fair_request_queue": {"capacity": 3}})
    assert message.startswith("fair_request_queue.capacity: unknown key; valid here: total_capacity,")


@pytest.mark.parametrize("key", ["call_timeout", "decision_budget"])
def test_a_retired_key_names_the_new_one(key: str) -> None:
    message = fault({"redis": {key: "50ms"}})
    assert message == f"redis: {key} is retired: redis.silence says how long Redis may say nothing"


def test_a_silence_that_outlasts_a_lease_names_both_keys() -> None:
    assert "redis.silence 8s" in (message := fault({"redis": {"silence": "8s"}}))
    assert "leases.inflight 15s" in message


def test_each_fault_has_its_line() -> None:
    lines = fault({"pool": "", "redis": {"url": "http://x"}, "nonsense": 1}).splitlines()
    assert [line.split(":")[0] for line in lines] == ["pool", "redis.url", "nonsense"]


def test_a_fault_never_shows_a_password() -> None:
    assert "hunter2" not in fault({"redis": {"url": "http://:hunter2@host"}})


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("pool: [", "is not YAML"),
        ("- a\n- b", "top level must be a mapping"),
        ("pool: a\npool: b", "'pool' is there twice"),
        ("[" * 5000, "is not YAML"),
        ("pool: 2026-99-99", "is not YAML"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, needle: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=r"picker\.yaml") as caught:
        load(path, {})
    assert needle in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read"):
        load(tmp_path / "absent.yaml", {})


def test_variables_overlay_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "pool: one\nredis: {url: redis://a:1}\nadmin:\n")
    variables = {
        "PICKER_REDIS__URL": "redis://b:2",
        "PICKER_ADMIN__TOKEN": "123456",  # text, whatever YAML would make of it
        "PICKER_FAIR_REQUEST_QUEUE__QUEUE_TTL": "5s",
        "PICKER_MODELS": "[{name: llama}]",
        "PATH": "/bin",
    }
    settings = load(path, variables)
    assert settings.pool == "one"
    assert settings.redis.url == "redis://b:2"
    assert settings.admin.token == "123456"
    assert settings.fair_request_queue.queue_ttl == 5
    assert settings.models[0].name == "llama"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PICKER_REDIS__ADDRESS", "x"),
        ("PICKER_NONSENSE", "1"),
        ("PICKER_POOL__NAME", "x"),
        ("PICKER_SCHEDULING__FALLBACKS", "many"),
        ("PICKER_SCHEDULING__FALLBACKS", "[1"),
    ],
)
def test_a_wrong_variable_is_named(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, "pool: one"), {name: value})
    assert str(caught.value).startswith(f"{name}: ")


def test_a_key_that_looks_like_a_service_link_is_a_key() -> None:
    settings = load(None, {"PICKER_DISCOVERY__DNS__NAME": "servers", "PICKER_DISCOVERY__DNS__PORT": "9000"})
    assert settings.discovery.dns is not None
    assert settings.discovery.dns.port == 9000


def test_a_token_from_a_file_has_no_trailing_newline() -> None:
    assert load(None, {"PICKER_ADMIN__TOKEN": "secret\n"}).admin.token == "secret"


def test_variables_of_kubernetes_services_are_ignored() -> None:
    links = {
        "PICKER_PORT": "tcp://10.0.0.9:9002",
        "PICKER_SERVICE_HOST": "10.0.0.9",
        "PICKER_SERVICE_PORT_GRPC": "9002",
        "PICKER_FLEET_PORT_9002_TCP_ADDR": "10.0.0.9",
    }
    assert load(None, links) == Settings()


def test_a_relative_endpoints_file_is_relative_to_the_configuration(
    tmp_path: Path,
) -> None:
    settings = load(written(tmp_path, "discovery: {file: endpoints.yaml}"), {})
    assert settings.discovery.file == tmp_path / "endpoints.yaml"


def test_settings_are_frozen_and_share_no_defaults() -> None:
    settings = Settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.pool = "other"
    weights = settings.fair_request_queue.model_copy(deep=True).band_weights
    weights.clear()
    assert len(Settings().fair_request_queue.band_weights) == 3


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just(10**400)
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(
            st.sampled_from(["url", "listen", "static", "address", "name", "weight", "queue_ttl", "unit"])
            | st.integers(),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(list(Settings.model_fields)) | st.integers(), trees, max_size=3))
def test_any_tree_is_settings_or_a_named_fault(tree: dict[str, object]) -> None:
    settings = None
    message = ""
    try:
        settings = parse(tree)
    except ConfigError as fault:
        message = str(fault)
    assert (settings is None) == bool(message)


def checked(path: Path) -> int:
    return cli.main(["check", str(path)])


def test_check_prints_a_summary_of_a_valid_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, WHOLE)
    assert checked(path) == 0
    out = capsys.readouterr()
    assert out.out.startswith(f"{path}: valid\n")
    assert "endpoints: static, 1 listed" in out.out
    assert "lower 1.8, watermark 2, upper 2.2" in out.out
    assert out.err == ""


def test_check_prints_a_line_for_each_fault_and_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "nonsense: 1\nextproc: {max_body_bytes: 1}")
    assert checked(path) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert len(out.err.splitlines()) == 2


@pytest.mark.parametrize("namespace", ["picker", "envoy.lb.subset_hint", "", "a:b", "a)%", "two words"])
def test_a_metadata_namespace_that_cannot_be_used_is_named(namespace: str) -> None:
    with pytest.raises(ConfigError, match=r"extproc\.metadata_namespace: "):
        parse({"extproc": {"metadata_namespace": namespace}})
