"""Envoy's bootstrap in each mode, validated by the real Envoy."""

import functools
import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from picker_fleet import cli, config
from picker_fleet.errors import ConfigError
from picker_tools.local_fleet.envoy import build_bootstrap, to_yaml
from picker_tools.local_fleet.parts import MODES, Mode

PICKERS = (("127.0.0.1", 9002), ("127.0.0.1", 9003))


def envoy_binary() -> str:
    spec = find_spec("envoy")
    assert spec is not None
    folders = spec.submodule_search_locations or []
    return next(str(path) for folder in folders if (path := Path(folder) / "_bin" / "envoy").exists())


EXT_PROC_MODES = [mode for mode in MODES if mode != "http"]


def built(mode: Mode, settings: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    """The bootstrap, to be read only: the same is built once."""
    return _built(mode, json.dumps(settings or {}), **{"pickers": PICKERS, **others})


@functools.cache
def _built(mode: Mode, settings: str, **others: Any) -> dict[str, Any]:
    local = ("127.0.0.1", 0)
    return build_bootstrap(config.parse(json.loads(settings)), mode=mode, listen=local, admin=local, **others)


def manager(tree: dict[str, Any]) -> dict[str, Any]:
    return tree["staticResources"]["listeners"][0]["filterChains"][0]["filters"][0]["typedConfig"]


def http_filter(tree: dict[str, Any], name: str) -> dict[str, Any]:
    filters = {each["name"]: each["typedConfig"] for each in manager(tree)["httpFilters"]}
    return filters[f"envoy.filters.http.{name}"]


def asking_filter(tree: dict[str, Any], mode: Mode) -> dict[str, Any]:
    """The filter by which Envoy asks the picker."""
    return http_filter(tree, "ext_authz" if mode == "http" else "ext_proc")


def filter_names(tree: dict[str, Any]) -> list[str]:
    return [each["name"].rpartition(".")[2] for each in manager(tree)["httpFilters"]]


def cluster(tree: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in tree["staticResources"]["clusters"] if each["name"] == name)


def assert_envoy_accepts(bootstrap: str, folder: Path) -> None:
    (folder / "envoy.yaml").write_text(bootstrap)
    command = [envoy_binary(), "--mode", "validate", "-c", str(folder / "envoy.yaml")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 0, said.stderr
    assert "OK" in said.stdout


@dataclass
class Command:
    """`picker envoy-config` and what it prints."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str, config: str = "", status: object = 0) -> tuple[str, str]:
        """Its output and its errors; it ends with `status`."""
        words = ["envoy-config", *arguments]
        if config:
            (self.folder / "picker.yaml").write_text(config)
            words += ["--config", str(self.folder / "picker.yaml")]
        try:
            ended: object = cli.main(words)
        except SystemExit as end:
            ended = end.code
        assert ended == status
        shown = self.capsys.readouterr()
        return shown.out, shown.err


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, capsys)


@pytest.mark.parametrize("debug_headers", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_real_envoy_accepts_each_mode(mode: Mode, debug_headers: bool, tmp_path: Path) -> None:
    assert_envoy_accepts(to_yaml(built(mode, debug_headers=debug_headers)), tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"scheduling": {"fallbacks": 0}},
        {"scheduling": {"fallbacks": 8}, "leases": {"access_log_interval": "1s"}},
        {"fair_request_queue": {"queue_ttl": "59m"}, "extproc": {"max_body_bytes": 100_000_000}},
    ],
)
def test_real_envoy_accepts_unusual_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    assert_envoy_accepts(to_yaml(built("headers", settings)), tmp_path)


@pytest.mark.parametrize(
    ("mode", "request_body", "response_headers", "response_body"),
    [
        ("standard", "FULL_DUPLEX_STREAMED", "SEND", "FULL_DUPLEX_STREAMED"),
        ("lean", "FULL_DUPLEX_STREAMED", "SKIP", None),
        ("headers", None, "SKIP", None),
    ],
)
def test_each_mode_sends_the_picker_its_parts_of_a_request(
    mode: Mode, request_body: str | None, response_headers: str, response_body: str | None
) -> None:
    processing = http_filter(built(mode), "ext_proc")["processingMode"]
    assert processing["requestHeaderMode"] == "SEND"
    assert processing.get("requestBodyMode") == request_body  # NONE is the default and left out
    assert processing["responseHeaderMode"] == response_headers
    assert processing.get("responseBodyMode") == response_body


@pytest.mark.parametrize("mode", MODES)
def test_pool_follows_the_fleet_and_the_pickers_order(mode: Mode) -> None:
    pool = cluster(built(mode), "pool")
    # The endpoints come from the replicas, whose own cluster needs no discovery.
    source = pool["edsClusterConfig"]["edsConfig"]["apiConfigSource"]
    assert pool["type"] == "EDS"
    assert source["apiType"] == "GRPC"
    assert source["grpcServices"][0]["envoyGrpc"]["clusterName"] == "picker"
    assert cluster(built(mode), "picker")["type"] == "STATIC"
    policy = pool["loadBalancingPolicy"]["policies"][0]["typedExtensionConfig"]["typedConfig"]
    assert policy["overrideHostSources"] == [{"header": "x-gateway-destination-endpoint"}]


@pytest.mark.parametrize("mode", MODES)
def test_requests_fail_without_pickers(mode: Mode) -> None:
    asking = asking_filter(built(mode), mode)
    assert not asking.get("failureModeAllow", False)
    assert asking["statusOnError"] == {"code": "ServiceUnavailable"}


@pytest.mark.parametrize("mode", MODES)
def test_envoy_balances_without_pickers_only_if_configured(mode: Mode) -> None:
    allowed = {
        way: asking_filter(built(mode, {"extproc": {"on_failure": way}}), mode).get("failureModeAllow")
        for way in ("deny", "balance")
    }
    assert allowed == {"deny": None, "balance": True}


@pytest.mark.parametrize("mode", MODES)
def test_a_queued_request_is_sent_to_another_replica(mode: Mode) -> None:
    service = "httpService" if mode == "http" else "grpcService"
    retry = asking_filter(built(mode), mode)[service]["retryPolicy"]
    assert retry["numRetries"] == 3
    assert {"reset", "connect-failure"} <= set(retry["retryOn"].split(","))
    assert retry["retryHostPredicate"][0]["name"] == "envoy.retry_host_predicates.previous_hosts"
    # A dead replica has the fewest streams: of two, balancing draws it three times in four.
    assert (3 / 4) ** (1 + int(retry["hostSelectionRetryMaxAttempts"])) < 1e-3


def test_each_listed_endpoint_gets_a_try() -> None:
    def retries(fallbacks: int) -> int:
        tree = built("lean", {"scheduling": {"fallbacks": fallbacks}})
        host = manager(tree)["routeConfig"]["virtualHosts"][0]
        return int(host["retryPolicy"]["numRetries"])

    assert [retries(fallbacks) for fallbacks in (0, 2, 8)] == [0, 2, 8]


@pytest.mark.parametrize("mode", MODES)
def test_only_stalled_requests_time_out(mode: Mode) -> None:
    tree = built(mode, {"fair_request_queue": {"queue_ttl": "2h"}}) if mode != "headers" else built(mode)
    route = manager(tree)["routeConfig"]["virtualHosts"][0]["routes"][0]["route"]
    # Answers may stream without a limit; a request may wait as long as the queue's TTL.
    assert route["timeout"] == "0s"
    assert "idleTimeout" not in route
    waits_s = 30 if mode == "headers" else 7200
    assert manager(tree)["requestTimeout"] == f"{waits_s + 60}s"
    assert manager(tree)["streamIdleTimeout"] == f"{max(3600, waits_s + 60)}s"
    # A half-sent request ends soon.
    assert manager(tree)["requestHeadersTimeout"] == "10s"
    assert manager(tree)["commonHttpProtocolOptions"] == {"idleTimeout": "120s"}


def test_headers_mode_waits_for_the_picker_longer_than_a_request_may_queue() -> None:
    assert http_filter(built("headers"), "ext_proc")["messageTimeout"] == "3600s"
    settings = {"fair_request_queue": {"queue_ttl": "2h"}}
    # A longer queue TTL is refused in this mode only.
    with pytest.raises(ConfigError, match=r"fair_request_queue\.queue_ttl.*3540s"):
        built("headers", settings)
    assert built("lean", settings)


def test_access_log_has_the_configured_interval_in_the_modes_that_need_it() -> None:
    settings = {"leases": {"access_log_interval": "3s"}}
    for mode in ("lean", "headers"):
        managed = manager(built(mode, settings))
        assert managed["accessLogOptions"] == {"accessLogFlushInterval": "3s"}
        assert managed["accessLog"][0]["name"] == "envoy.access_loggers.http_grpc"
    assert "accessLog" not in manager(built("standard", settings))


def test_usage_is_read_where_the_picker_does_not_see_the_answer() -> None:
    assert filter_names(built("standard")) == ["ext_proc", "router"]
    for mode in ("lean", "headers"):
        assert filter_names(built(mode)) == ["sse_to_metadata", "json_to_metadata", "ext_proc", "router"]


def test_only_headers_mode_reads_the_request_and_only_standard_forwards_the_endpoint_that_served() -> None:
    headers, lean, standard = built("headers"), built("lean"), built("standard")
    assert "requestRules" in http_filter(headers, "json_to_metadata")
    assert "requestRules" not in http_filter(lean, "json_to_metadata")
    forwarded = {
        name: http_filter(tree, "ext_proc")["metadataOptions"]["forwardingNamespaces"]["untyped"]
        for name, tree in (("headers", headers), ("lean", lean), ("standard", standard))
    }
    assert forwarded == {
        "headers": ["envoy.lb.subset_hint", "picker.request"],
        "lean": ["envoy.lb.subset_hint"],
        "standard": ["envoy.lb.subset_hint", "envoy.lb"],
    }


@pytest.mark.parametrize("mode", EXT_PROC_MODES)
def test_envoy_accepts_the_pickers_metadata(mode: Mode) -> None:
    options = http_filter(built(mode), "ext_proc")["metadataOptions"]
    assert options["receivingNamespaces"]["untyped"] == ["envoy.lb", "picker"]


def test_debug_headers_only_when_asked() -> None:
    plain = manager(built("lean"))["routeConfig"]
    shown = manager(built("lean", debug_headers=True))["routeConfig"]
    # Session token and pressure are for clients; in `standard` the picker sets them.
    assert [each["header"]["key"] for each in plain["responseHeadersToAdd"]] == [
        "x-session-token",
        "x-queue-pressure",
    ]
    assert "responseHeadersToAdd" not in manager(built("standard"))["routeConfig"]
    assert {each["header"]["key"] for each in shown["responseHeadersToAdd"]} >= {
        "x-picker-header",
        "x-picker-endpoint",
        "x-picker-served",
    }


def test_pickers_by_name_are_resolved() -> None:
    tree = built("lean", pickers=(("picker.example.internal", 9002),))
    assert cluster(tree, "picker")["type"] == "STRICT_DNS"


def test_command_prints_a_bootstrap_of_the_configuration(command: Command) -> None:
    config = "extproc: {listen: '0.0.0.0:9555'}\nleases: {access_log_interval: 2s}\n"
    text, _ = command("--mode", "headers", "--listen", "127.0.0.1:18000", config=config)
    tree = yaml.safe_load(text)
    listener = tree["staticResources"]["listeners"][0]["address"]["socketAddress"]
    picker = cluster(tree, "picker")["loadAssignment"]["endpoints"][0]["lbEndpoints"][0]
    assert listener == {"address": "127.0.0.1", "portValue": 18000}
    assert picker["endpoint"]["address"]["socketAddress"] == {"address": "127.0.0.1", "portValue": 9555}
    assert manager(tree)["accessLogOptions"] == {"accessLogFlushInterval": "2s"}


def test_command_refuses_a_bad_configuration(command: Command) -> None:
    _, error = command(config="queue: {}\npool: 'a b'\n", status=2)
    faults = error.strip().splitlines()
    assert len(faults) == 2
    assert any("queue" in fault for fault in faults)


def removed(tree: dict[str, Any]) -> set[str]:
    mutation = manager(tree)["earlyHeaderMutationExtensions"][0]["typedConfig"]
    return {each["remove"] for each in mutation["mutations"]}


@pytest.mark.parametrize("mode", MODES)
def test_steering_headers_are_removed_unless_trusted(mode: Mode) -> None:
    names = {
        f"x-{who}-{what}"
        for who in ("gateway", "llm-d")
        for what in ("inference-objective", "model-name-rewrite")
    }
    assert names <= removed(built(mode))
    assert names - removed(built(mode, trusted=("x-gateway-inference-objective",))) == {
        "x-gateway-inference-objective",
        "x-llm-d-inference-objective",
    }


def test_command_trusts_a_header_in_both_spellings_and_warns_of_it(command: Command) -> None:
    plain, _ = command()
    trusting, _ = command("--trust-headers", "X-LLM-D-Inference-Fairness-ID,x-workload-context")
    pair = {"x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id"}
    assert removed(yaml.safe_load(plain)) - removed(yaml.safe_load(trusting)) == pair
    assert "WARNING" not in plain
    assert trusting.startswith("# WARNING: ")
    assert all(name in trusting.partition("\nnode:")[0] for name in pair)


@pytest.mark.parametrize("name", ["x-gateway-destination-endpoint", "x-request-id", "authorization", ""])
def test_command_refuses_to_trust_other_headers(name: str, command: Command) -> None:
    _, error = command("--trust-headers", name, status=2)
    assert f"--trust-headers: '{name}' is " in error
    assert "x-gateway-inference-fairness-id" in error


@pytest.mark.parametrize("arguments", [["--listen", "nowhere"], ["--picker", "host"], ["--mode", "fat"]])
def test_command_refuses_bad_arguments(arguments: list[str], command: Command) -> None:
    assert arguments[1] in command(*arguments, status=2)[1]


def test_command_line_does_not_import_envoys_types() -> None:
    # They cost more than half a second; a replica must not pay it.
    program = (
        "import sys, picker_fleet.cli, picker_tools.local_fleet.up_command; "
        "sys.exit(any(name.startswith('envoy_data_plane') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("picker ")


@pytest.mark.parametrize("mode", MODES)
def test_a_configured_namespace_replaces_the_default_everywhere(mode: Mode) -> None:
    own = built(mode, {"extproc": {"metadata_namespace": "gateway.lb"}}, debug_headers=True)
    # Everything with the default namespace, except the subset hint's.
    text = yaml.safe_dump(built(mode, debug_headers=True)).replace("envoy.lb.subset_hint", "subset_hint")
    assert "envoy.lb" in text
    assert (
        yaml.safe_load(text.replace("envoy.lb", "gateway.lb").replace("subset_hint", "envoy.lb.subset_hint"))
        == own
    )


def test_mode_http_waits_for_as_long_as_a_request_may_queue() -> None:
    asking = asking_filter(built("http", {"fair_request_queue": {"queue_ttl": "2h"}}), "http")
    service = asking["httpService"]
    assert service["serverUri"]["timeout"] == "7260s"
    # Envoy ends each try after the longest pause between two tries.
    assert service["retryPolicy"]["retryBackOff"]["maxInterval"] == "7260s"


def test_mode_http_sends_whole_bodies_up_to_the_limit_and_only_headers_that_are_read() -> None:
    asking = asking_filter(built("http", {"extproc": {"max_body_bytes": 5000}}), "http")
    assert asking["withRequestBody"] == {"maxRequestBytes": 5001, "allowPartialMessage": True}
    sent = {each["exact"] for each in asking["allowedHeaders"]["patterns"]}
    assert "x-request-id" in sent
    assert "authorization" not in sent
    assert asking["httpService"]["pathPrefix"] == "/check"


def test_mode_http_sends_on_the_endpoint_alone_and_keeps_the_token_as_metadata() -> None:
    answer = asking_filter(built("http"), "http")["httpService"]["authorizationResponse"]
    names = {kind: {each["exact"] for each in matcher["patterns"]} for kind, matcher in answer.items()}
    assert names["allowedUpstreamHeaders"] == {"x-gateway-destination-endpoint"}
    assert names["allowedClientHeadersOnSuccess"] == {"x-session-token", "x-queue-pressure"}
    assert "x-picker-accounting-token" in names["dynamicMetadataFromHeaders"]


def test_mode_http_needs_the_address_of_its_port(command: Command) -> None:
    command("--mode", "http", status=2)


@pytest.mark.parametrize("mode", ["lean", "http"])
def test_envoy_speaks_tls_to_replicas_that_do(mode: str, command: Command) -> None:
    config = "extproc: {tls: {}}\nhttp: {listen: 127.0.0.1:9003, tls: {}}\n"
    files = ("--picker-ca", "/ca", "--picker-cert", "/cert", "--picker-key", "/key")
    printed, _ = command("--mode", mode, *files, config=config)
    assert "WARNING" not in printed
    pickers = [
        each for each in yaml.safe_load(printed)["staticResources"]["clusters"] if each["name"] != "pool"
    ]
    for cluster in pickers:
        context = cluster["transportSocket"]["typedConfig"]["commonTlsContext"]
        assert context["alpnProtocols"] == (["http/1.1"] if cluster["name"] == "picker-http" else ["h2"])
        assert context["validationContext"] == {"trustedCa": {"filename": "/ca"}}
        [own] = context["tlsCertificates"]
        assert own == {"certificateChain": {"filename": "/cert"}, "privateKey": {"filename": "/key"}}
    assert "accepts any certificate" in command("--mode", mode, config=config)[0]


def test_files_of_tls_that_make_no_sense_are_refused(command: Command) -> None:
    assert "belong together" in command("--picker-cert", "/cert", status=2)[1]
    assert "do not speak TLS" in command("--picker-ca", "/ca", status=2)[1]


def test_operators_get_a_listener_of_their_own_only_when_asked(command: Command, tmp_path: Path) -> None:
    config = "admin: {listen: '0.0.0.0:8083'}"
    assert len(yaml.safe_load(command(config=config)[0])["staticResources"]["listeners"]) == 1
    text, _ = command("--admin-listen", "127.0.0.1:8081", config=config)
    tree = yaml.safe_load(text)
    for_clients, for_operators = tree["staticResources"]["listeners"]
    assert for_clients["name"] == "lean"
    assert for_operators["address"]["socketAddress"]["portValue"] == 8081
    hosts = cluster(tree, "picker-admin")["loadAssignment"]["endpoints"][0]["lbEndpoints"]
    assert hosts[0]["endpoint"]["address"]["socketAddress"] == {"address": "127.0.0.1", "portValue": 8083}
    assert_envoy_accepts(text, tmp_path)
