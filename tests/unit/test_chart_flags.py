"""The flags of gateways' Helm charts: the settings that flags make, and the flags that are ignored."""

import argparse
from pathlib import Path

import pytest

from picker_fleet.domain.config import Settings
from picker_fleet.domain.errors import ConfigError
from picker_fleet.domain.sections import Tls
from picker_kubernetes import chart_flags

# Flags as the inferencepool chart of the Gateway API inference extension v1.5.0 renders them.
CHART = (
    *("--pool-name", "llm", "--pool-namespace", "models", "--pool-group", "inference.networking.k8s.io"),
    *("--zap-encoder", "json", "--config-file", "{file}", "--tracing=false", "--metrics-endpoint-auth=false"),
    *("--v", "2", "--ha-enable-leader-election"),
)
PLUGINS = """
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: prefix-cache-scorer
  parameters: {lruCapacityPerServer: 31250}
- {type: made-up-scorer, name: mine}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: 5}
  - {pluginRef: prefix-cache-scorer}
"""


def made(*words: str, environ: dict[str, str] | None = None) -> tuple[Settings, list[str]]:
    """The settings and remarks that result from the flags `words`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    chart_flags.add_flags(parser)
    args, args.unknown = parser.parse_known_args(words)
    return chart_flags.settings(args, environ or {})


def listening(settings: Settings) -> list[str | None]:
    """The addresses on which gRPC, its health service and the admin API listen."""
    return [settings.extproc.listen, settings.extproc.health_listen, settings.admin.listen]


def test_the_flag_for_the_pool_alone_gives_ports_and_defaults_of_the_reference_picker() -> None:
    settings, remarks = made("--pool-name", "llm", "--pool-namespace", "models")
    assert settings.pool == "models.llm"
    assert settings.discovery.kubernetes is not None
    assert (settings.discovery.kubernetes.pool, settings.discovery.kubernetes.namespace) == ("llm", "models")
    assert listening(settings) == ["0.0.0.0:9002", "0.0.0.0:9003", "0.0.0.0:9090"]
    assert settings.admin.reference_metrics
    assert settings.fair_request_queue.overload_status == 429
    assert settings.extproc.tls == Tls()
    assert "x-gateway-inference-fairness-id, x-gateway-inference-objective" in "\n".join(remarks)


def test_the_flags_of_a_chart_start_the_picker_and_unknown_flags_are_named(tmp_path: Path) -> None:
    (tmp_path / "plugins.yaml").write_text(PLUGINS)
    settings, remarks = made(*(word.format(file=tmp_path / "plugins.yaml") for word in CHART))
    assert settings.scheduling.scorers == {"queue-depth": 5, "prefix-affinity": 1}
    named = "\n".join(remarks)
    flags = ("--zap-encoder", "--v:", "--ha-enable-leader-election")
    assert [text for text in (*flags, "made-up-scorer", "lruCapacityPerServer") if text not in named] == []
    assert "json" not in named, "the value of --zap-encoder"


def test_flags_override_the_environment_which_overrides_defaults() -> None:
    ports = ("--grpc-port", "7002", "--grpc-health-port", "7003", "--metrics-port", "7090")
    environ = {
        "NAMESPACE": "other",
        "PICKER_REDIS__URL": "redis://valkey:6379/1",
        "PICKER_EXTPROC__LISTEN": "0.0.0.0:1",
        "PICKER_REQUEST_QUEUE_CONTROLLER__WATERMARK_PER_BACKEND": "7",
    }
    settings, _ = made("--pool-name", "llm", *ports, environ=environ)
    assert settings.redis.url == "redis://valkey:6379/1"
    assert listening(settings) == ["0.0.0.0:7002", "0.0.0.0:7003", "0.0.0.0:7090"]
    assert settings.pool == "other.llm"
    assert settings.request_queue_controller.watermark_per_backend == 7
    assert made("--pool-name", "llm")[0].request_queue_controller.is_adaptive


def test_ext_proc_is_served_over_tls_unless_a_flag_turns_tls_off(tmp_path: Path) -> None:
    assert made("--pool-name", "llm", "--secure-serving=false")[0].extproc.tls is None
    given, _ = made("--pool-name", "llm", "--secure-serving", "--cert-path", str(tmp_path))
    assert given.extproc.tls == Tls(cert=tmp_path / "tls.crt", key=tmp_path / "tls.key")


def test_both_flags_config_and_config_file_may_name_a_picker_configuration(tmp_path: Path) -> None:
    file = tmp_path / "picker.yaml"
    file.write_text("scheduling: {scorers: []}\ndiscovery: {static: [{address: '10.0.0.1:8000'}]}\n")
    for flag in ("--config", "--config-file"):
        settings, _ = made("--pool-name", "llm", flag, str(file))
        assert settings.scheduling.scorers == {}
        assert settings.discovery.kubernetes is None, "the file's source replaces the pool"


def test_metric_series_that_flags_name_keep_their_labels() -> None:
    settings, remarks = made(
        *("--pool-name", "llm", '--total-queued-requests-metric="sglang:num_queue_reqs"'),
        *("--kv-cache-usage-percentage-metric", "blocks{kv_cache_block_type=fraction}"),
        *("--lora-info-metric", "", '--model-server-metrics-path="/prometheus/metrics"'),
        *("--total-running-requests-metric", "two words"),
    )
    assert settings.scraping.series == {
        "waiting": "sglang:num_queue_reqs",
        "kv_utilisation": "blocks{kv_cache_block_type=fraction}",
        "path": "/prometheus/metrics",
    }
    assert any("running-requests-metric: 'two words' is no name" in remark for remark in remarks)


def test_pools_with_long_names_still_have_different_keys() -> None:
    pools = {made("--pool-name", "a" * 200 + end, "--pool-namespace", "n" * 60)[0].pool for end in "xy"}
    assert len(pools) == 2
    assert all(len(pool) <= 64 for pool in pools)


BAD_FLAGS = [
    (["--pool-group", "inference.networking.x-k8s.io"], "--pool-group"),
    (["--config-text", "[]"], "--config-text: the top level must be a mapping"),
    (["--config-text", "kind: Other"], "--config-text: not an EndpointPickerConfig"),
    (["--config-file", "/nowhere"], "--config-file: "),
    (["--pool-namespace", "A/B"], r"discovery\.kubernetes\.namespace"),
]


@pytest.mark.parametrize(("words", "fault"), BAD_FLAGS)
def test_invalid_flags_raise_configuration_errors(words: list[str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        made("--pool-name", "llm", *words)


@pytest.mark.parametrize(("text", "value"), [("", True), ("=true", True), ("=false", False)])
def test_a_boolean_flag_needs_no_value(text: str, value: bool) -> None:
    assert made("--pool-name", "llm", f"--conformance{text}")[0].extproc.conformance is value
