"""Envoy's bootstrap in each mode, validated by the real Envoy."""

import functools
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tables import cases

from picker_fleet import cli
from picker_fleet.domain import config
from picker_tools.local_fleet.bootstrap import build_bootstrap, to_yaml
from picker_tools.local_fleet.parts import MODES, Mode
from picker_tools.local_fleet.processes import envoy_binary

PICKERS = (("127.0.0.1", 9002), ("127.0.0.1", 9003))


def built(mode: Mode, settings: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    """The Envoy bootstrap made with these arguments. Tests share the result, so no test may change it."""
    return _built(mode, json.dumps(settings or {}), **{"pickers": PICKERS, **others})


@functools.cache
def _built(mode: Mode, settings: str, **others: Any) -> dict[str, Any]:
    local = ("127.0.0.1", 0)
    return build_bootstrap(config.parse(json.loads(settings)), mode=mode, listen=local, admin=local, **others)


def parts(tree: dict[str, Any]) -> dict[str, Any]:
    """The parts of a bootstrap by short names; the part `asking` is the filter that calls the picker."""
    resources = tree["staticResources"]
    manager = resources["listeners"][0]["filterChains"][0]["filters"][0]["typedConfig"]
    filters = {each["name"].rpartition(".")[2]: each["typedConfig"] for each in manager["httpFilters"]}
    asking = filters.get("ext_authz") or filters["ext_proc"]
    asking = asking.get("extensionConfig", {"typedConfig": asking})["typedConfig"]
    return {
        "manager": manager, "filters": filters, "names of filters": list(filters), "asking": asking,
        "service": asking.get("httpService") or asking["grpcService"], "routes": manager["routeConfig"],
        "host": manager["routeConfig"]["virtualHosts"][0],
        "clusters": {each["name"]: each for each in resources["clusters"]},
    }  # fmt: skip


def at(node: Any, path: str) -> Any:
    """The node at `path`, whose steps are keys, indexes, or `*` for all items of a list; None if missing."""
    step, _, rest = path.partition(".")
    if node is None or not path:
        return node
    if step == "*":
        return [at(each, rest) for each in node]
    return at(node[int(step)] if isinstance(node, list) else node.get(step), rest)


def hosts(tree: dict[str, Any], cluster: str) -> list[dict[str, Any]]:
    path = f"clusters.{cluster}.loadAssignment.endpoints.0.lbEndpoints.*.endpoint.address.socketAddress"
    return list(at(parts(tree), path))


def assert_envoy_accepts(bootstrap: str, folder: Path) -> None:
    (folder / "envoy.yaml").write_text(bootstrap)
    command = [envoy_binary(), "--mode", "validate", "-c", str(folder / "envoy.yaml")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 0, said.stderr
    assert "OK" in said.stdout


Command = Callable[..., tuple[str, str]]


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `picker envoy-config`; returns its output and its error output."""

    def run(*arguments: str, config: str = "", status: object = 0) -> tuple[str, str]:
        words = ["envoy-config", *arguments]
        if config:
            (tmp_path / "picker.yaml").write_text(config)
            words += ["--config", str(tmp_path / "picker.yaml")]
        try:
            ended: object = cli.main(words)
        except SystemExit as end:
            ended = end.code
        assert ended == status
        shown = capsys.readouterr()
        return shown.out, shown.err

    return run


@pytest.mark.parametrize("mode", MODES)
def test_real_envoy_accepts_each_modes_bootstrap(mode: Mode, tmp_path: Path) -> None:
    # Fleets of tests/fleet cover bootstraps without the options given here.
    assert_envoy_accepts(to_yaml(built(mode, TENANTS, debug_headers=True, client_rate=50)), tmp_path)


TENANTS = {"tenants": {"headers": ["x-tenant"]}, "extproc": {"trusted_headers": ["x-tenant"]}}
LARGEST = {"scheduling": {"fallbacks": 8}, "fair_request_queue": {"queue_ttl": "59m"},
           "leases": {"access_log_interval": "1s"}, "extproc": {"max_body_bytes": 100_000_000}}  # fmt: skip


@pytest.mark.parametrize("settings", [{"scheduling": {"fallbacks": 0}}, LARGEST])
def test_real_envoy_accepts_a_bootstrap_of_unusual_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    assert_envoy_accepts(to_yaml(built("lean", settings)), tmp_path)


ATTEMPTS = "filters.router.upstreamLog"
DUPLEX, HINT = "FULL_DUPLEX_STREAMED", "envoy.lb.subset_hint"
FORWARDED = "asking.metadataOptions.forwardingNamespaces.untyped"
TO_CLIENT = "routes.responseHeadersToAdd.*.header.key"
RETRY, ANSWER = "service.retryPolicy", "service.authorizationResponse"


def seen(request_body: str | None, response_headers: str, response_body: str | None) -> dict[str, Any]:
    """The ext_proc filter's modes that send the picker the request's headers and the parts not None."""
    modes = {"requestHeader": "SEND", "requestBody": request_body}
    modes |= {"responseHeader": response_headers, "responseBody": response_body}
    facts = {f"asking.processingMode.{part}Mode": mode for part, mode in modes.items()}
    return facts | {"asking.metadataOptions.receivingNamespaces.untyped": ["envoy.lb", "picker"]}


def timeouts(waits_s: int, sends_s: int) -> dict[str, Any]:
    """Envoy's timeouts if a request may queue for `waits_s` seconds: none for answers, a short one for
    headers, `sends_s` for whole requests."""
    return {
        "host.routes.0.route.timeout": "0s",
        "host.routes.0.route.idleTimeout": None,
        "manager.requestTimeout": f"{sends_s}s",
        "manager.streamIdleTimeout": f"{max(3600, waits_s + 60)}s",
        "manager.requestHeadersTimeout": "10s",
        "manager.commonHttpProtocolOptions": {"idleTimeout": "120s"},
        "manager.http2ProtocolOptions": {
            "maxConcurrentStreams": 128,
            "initialStreamWindowSize": 256 * 1024,
            "initialConnectionWindowSize": 1024 * 1024,
            "overrideStreamErrorOnInvalidHttpMessage": True,
        },
    }


IN_EVERY_MODE: dict[str, Any] = {
    # A request that an endpoint redirects, or refuses as full, goes to the next endpoint.
    "host.retryPolicy.retriableStatusCodes": [300, 301, 302, 303, 307, 308, 429],
    # If all replicas fail, requests fail; if one fails, Envoy sends its queued requests to another replica.
    "asking.failureModeAllow": None,
    "asking.statusOnError": {"code": "ServiceUnavailable"},
    f"{RETRY}.numRetries": 3,
    f"{RETRY}.retryHostPredicate.*.name": ["envoy.retry_host_predicates.previous_hosts"],
}
# Envoy reads token usage in modes in which the picker does not see the answer. Clients get a session token
# and the queue pressure, in the mode `standard` from the picker.
IN_ONE_MODE: dict[Mode, dict[str, Any]] = {
    "standard": {
        **seen(DUPLEX, "SEND", DUPLEX),
        "names of filters": ["ext_proc", "router"],
        FORWARDED: [HINT, "envoy.lb"],
        "asking.requestAttributes": ["request.id"],
        f"{ATTEMPTS}.*.name": ["envoy.access_loggers.http_grpc"],
        TO_CLIENT: ["x-request-id"],
    },
    "lean": {
        **seen(DUPLEX, "SKIP", None),
        "names of filters": ["lua", "header_mutation", "ext_proc", "router"],
        # Entries about an answer and about the end of its request share a stream, so they stay in order.
        f"{ATTEMPTS}.1.typedConfig.commonConfig": at(
            parts(built("lean")), "manager.accessLog.0.typedConfig.commonConfig"
        ),
        FORWARDED: [HINT],
        TO_CLIENT: ["x-request-id", "x-session-token", "x-queue-pressure"],
    },
    "http": {
        f"{ANSWER}.allowedUpstreamHeaders.patterns.*.exact": [
            "x-encoder-hosts-ports",
            "x-gateway-destination-endpoint",
            "x-prefiller-host-port",
        ],
        f"{ANSWER}.allowedClientHeadersOnSuccess.patterns.*.exact": ["x-queue-pressure", "x-session-token"],
    },
}


def facts_of(bootstrap: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """The values of `bootstrap` at the paths of `facts`."""
    found = parts(bootstrap)
    return {path: at(found, path) for path in facts}


@pytest.mark.parametrize("mode", MODES)
def test_envoys_bootstrap_for_each_mode_has_the_settings_of_this_mode(mode: Mode) -> None:
    facts = IN_EVERY_MODE | IN_ONE_MODE[mode]
    assert facts_of(built(mode), facts) == facts


TWO_HOURS = {"fair_request_queue": {"queue_ttl": "2h"}}
THREE_SECONDS = {"leases": {"access_log_interval": "3s"}}
ACCESS_LOG = {
    "manager.accessLogOptions": {"accessLogFlushInterval": "3s"},
    "manager.accessLog.*.name": ["envoy.access_loggers.http_grpc"],
}
# Envoy uses the longest pause between two tries of a call also as the timeout of each try.
UNTIL_QUEUED = {"service.serverUri.timeout": "7260s", f"{RETRY}.retryBackOff.maxInterval": "7260s"}
LIMIT = {"asking.withRequestBody": {"maxRequestBytes": 5001, "allowPartialMessage": True}}
UNDER_SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "deny": (" ".join(MODES), {"extproc": {"on_failure": "deny"}}, {"asking.failureModeAllow": None}),
    "balance": (" ".join(MODES), {"extproc": {"on_failure": "balance"}}, {"asking.failureModeAllow": True}),
    "only stalled requests time out": ("standard lean", TWO_HOURS, timeouts(7200, 7260)),
    "requests that wait do not time out, unfinished bodies do": ("http", TWO_HOURS, timeouts(7200, 60)),
    "checks wait as long as a request may queue": ("http", TWO_HOURS, UNTIL_QUEUED),
    "the access log has its interval": ("lean http", THREE_SECONDS, ACCESS_LOG),
    "the access log has only cut answers": (
        "standard",
        THREE_SECONDS,
        {"manager.accessLog.0.filter.responseFlagFilter.flags": ["UC", "UR", "UPE"]},
    ),
    "a retry budget": (
        "standard lean http",
        {"outlier_detection": {"retry_budget_percent": 35}},
        {"clusters.pool.circuitBreakers.thresholds.0.retryBudget.budgetPercent.value": 35},
    ),
    "one byte more than the limit is buffered": ("http", {"extproc": {"max_body_bytes": 5000}}, LIMIT),
    **{
        f"one retry for each of {n} fallbacks": (
            "lean", {"scheduling": {"fallbacks": n}}, {"host.retryPolicy.numRetries": n}
        )
        for n in (0, 2, 8)
    },
}  # fmt: skip
ROWS = {
    f"{what}, {mode}": (mode, settings, facts)
    for what, (modes, settings, facts) in UNDER_SETTINGS.items()
    for mode in modes.split()
}


@cases("mode, settings, facts", ROWS)
def test_a_setting_takes_effect_in_envoys_bootstrap(
    mode: Mode, settings: dict[str, Any], facts: dict[str, Any]
) -> None:
    assert facts_of(built(mode, settings), facts) == facts


@pytest.mark.parametrize("mode", MODES)
def test_envoys_retries_avoid_a_dead_replica(mode: Mode) -> None:
    retry = parts(built(mode))["service"]["retryPolicy"]
    assert {"reset", "connect-failure"} <= set(retry["retryOn"].split(","))
    # A dead replica has the fewest streams: of two replicas, Envoy draws the dead one three times in four.
    assert (3 / 4) ** (1 + int(retry["hostSelectionRetryMaxAttempts"])) < 1e-3


def test_envoy_sends_the_headers_that_the_picker_reads_and_debug_headers_on_demand() -> None:
    http, lean = parts(built("http")), parts(built("lean", debug_headers=True))
    sent = at(http, "asking.allowedHeaders.patterns.*.exact")
    assert "x-request-id" in sent
    assert "authorization" not in sent
    metadata = at(http, "service.authorizationResponse.dynamicMetadataFromHeaders.patterns.*.exact")
    assert "x-picker-accounting-token" in metadata
    shown = set(at(lean, "routes.responseHeadersToAdd.*.header.key"))
    assert shown >= {"x-picker-header", "x-picker-endpoint", "x-picker-served"}


def test_envoy_resolves_replicas_given_by_host_name_by_dns() -> None:
    tree = built("lean", pickers=(("picker.example.internal", 9002),))
    assert at(parts(tree), "clusters.picker.type") == "STRICT_DNS"


def test_command_envoy_config_prints_a_bootstrap_of_the_configuration(command: Command) -> None:
    config = "extproc: {listen: '0.0.0.0:9555'}\nleases: {access_log_interval: 2s}\n"
    text, _ = command("--mode", "lean", "--listen", "127.0.0.1:18000", config=config)
    tree = yaml.safe_load(text)
    listener = at(tree, "staticResources.listeners.0.address.socketAddress")
    assert listener == {"address": "127.0.0.1", "portValue": 18000}
    assert hosts(tree, "picker") == [{"address": "127.0.0.1", "portValue": 9555}]
    assert parts(tree)["manager"]["accessLogOptions"] == {"accessLogFlushInterval": "2s"}


def removed(tree: dict[str, Any]) -> set[str]:
    return set(at(parts(tree), "manager.earlyHeaderMutationExtensions.0.typedConfig.mutations.*.remove"))


@pytest.mark.parametrize("mode", MODES)
def test_envoy_removes_steering_headers_unless_they_are_trusted(mode: Mode) -> None:
    objective = {"x-gateway-inference-objective", "x-llm-d-inference-objective"}
    names = objective | {"x-gateway-model-name-rewrite", "x-llm-d-model-name-rewrite"}
    assert names <= removed(built(mode))
    assert names - removed(built(mode, trusted=("x-gateway-inference-objective",))) == objective


def test_command_envoy_config_trusts_a_header_in_both_spellings_with_a_warning(command: Command) -> None:
    plain, _ = command()
    trusting, _ = command("--trust-headers", "X-LLM-D-Inference-Fairness-ID,x-workload-context")
    pair = {"x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id"}
    assert removed(yaml.safe_load(plain)) - removed(yaml.safe_load(trusting)) == pair
    assert "WARNING" not in plain
    assert trusting.startswith("# WARNING: ")
    assert all(name in trusting.partition("\nnode:")[0] for name in pair)


@pytest.mark.parametrize("name", ["x-gateway-destination-endpoint", "x-request-id", "authorization", ""])
def test_command_envoy_config_refuses_to_trust_other_headers(name: str, command: Command) -> None:
    _, error = command("--trust-headers", name, status=2)
    assert f"--trust-headers: '{name}' is " in error
    assert "x-gateway-inference-fairness-id" in error


@pytest.mark.parametrize("arguments", [["--listen", "nowhere"], ["--picker", "host"], ["--mode", "fat"]])
def test_command_envoy_config_refuses_bad_arguments(arguments: list[str], command: Command) -> None:
    assert arguments[1] in command(*arguments, status=2)[1]


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("picker ")


@pytest.mark.parametrize("mode", ["lean", "http"])
def test_envoy_reads_cached_tokens_if_the_prefix_index_needs_them(mode: str) -> None:
    scored = built(mode, {"scheduling": {"scorers": {"prefix-affinity": 3}}})
    assert "prompt_tokens_details" in str(scored)
    assert "prompt_tokens_details" not in str(built(mode, {"scheduling": {"scorers": {"queue-depth": 3}}}))


@pytest.mark.parametrize("mode", MODES)
def test_with_tenants_envoy_removes_untrusted_headers_and_sends_limits(mode: Mode) -> None:
    with_tenants = built(mode, TENANTS)
    found, plain = parts(with_tenants), parts(built(mode))
    assert removed(with_tenants) - removed(built(mode)) == {"x-tenant"}
    assert "x-tenant" not in removed(built(mode, TENANTS, trusted=("x-tenant",)))
    limits = {"x-ratelimit-remaining-tokens", "anthropic-ratelimit-tokens-reset", "x-picker-demoted"}
    assert not limits & {*plain["routes"].get("responseHeadersToRemove", ())}
    if mode != "standard":  # in `standard` the picker removes limit headers
        assert limits <= {*found["routes"]["responseHeadersToRemove"]}
    if mode == "lean":
        assert limits <= {*at(found, TO_CLIENT)}
    if mode == "http":
        assert limits <= {*at(found, f"{ANSWER}.allowedClientHeadersOnSuccess.patterns.*.exact")}
        assert "x-should-retry" in at(found, f"{ANSWER}.allowedClientHeaders.patterns.*.exact")


@pytest.mark.parametrize("mode", MODES)
def test_the_client_rate_option_limits_requests_per_client_address(mode: Mode) -> None:
    bucket = at(parts(built(mode, client_rate=50)), "filters.local_ratelimit.descriptors.0.tokenBucket")
    assert bucket == {"maxTokens": 100, "tokensPerFill": 50, "fillInterval": "1s"}
    assert "local_ratelimit" not in parts(built(mode))["filters"]


@pytest.mark.parametrize("mode", MODES)
def test_a_configured_metadata_namespace_replaces_the_default_everywhere(mode: Mode) -> None:
    own = built(mode, {"extproc": {"metadata_namespace": "gateway.lb"}}, debug_headers=True)
    # The default bootstrap with its namespace replaced, except in the subset hint.
    default = yaml.safe_dump(built(mode, debug_headers=True))
    text, changes = re.subn(r"envoy\.lb(?!\.subset_hint)", "gateway.lb", default)
    assert changes
    assert yaml.safe_load(text) == own


def test_the_bootstrap_for_mode_http_needs_the_address_of_the_http_port(command: Command) -> None:
    command("--mode", "http", status=2)


@pytest.mark.parametrize("mode", ["lean", "http"])
def test_envoy_speaks_tls_to_replicas_that_serve_tls(mode: str, command: Command) -> None:
    config = "extproc: {tls: {}}\nhttp: {listen: 127.0.0.1:9003, tls: {}}\n"
    files = ("--picker-ca", "/ca", "--picker-cert", "/cert", "--picker-key", "/key")
    printed, _ = command("--mode", mode, *files, config=config)
    assert "WARNING" not in printed
    clusters = parts(yaml.safe_load(printed))["clusters"]
    for name in clusters.keys() - {"pool"}:
        context = clusters[name]["transportSocket"]["typedConfig"]["commonTlsContext"]
        assert context["alpnProtocols"] == (["http/1.1"] if name == "picker-http" else ["h2"])
        assert context["validationContext"] == {"trustedCa": {"filename": "/ca"}}
        own = {"certificateChain": {"filename": "/cert"}, "privateKey": {"filename": "/key"}}
        assert context["tlsCertificates"] == [own]
    assert "accepts any certificate" in command("--mode", mode, config=config)[0]


def test_incomplete_or_unused_tls_files_are_refused(command: Command) -> None:
    assert "belong together" in command("--picker-cert", "/cert", status=2)[1]
    assert "do not speak TLS" in command("--picker-ca", "/ca", status=2)[1]


def test_the_bootstrap_has_a_listener_for_operators_only_by_option(command: Command, tmp_path: Path) -> None:
    config = "admin: {listen: '0.0.0.0:8083'}"
    assert len(at(yaml.safe_load(command(config=config)[0]), "staticResources.listeners")) == 1
    text, _ = command("--admin-listen", "127.0.0.1:8081", config=config)
    tree = yaml.safe_load(text)
    for_clients, for_operators = at(tree, "staticResources.listeners")
    assert for_clients["name"] == "lean"
    assert for_operators["address"]["socketAddress"]["portValue"] == 8081
    assert hosts(tree, "picker-admin") == [{"address": "127.0.0.1", "portValue": 8083}]
    assert_envoy_accepts(text, tmp_path)
    # Envoy speaks TLS to the replicas' admin port if that port has TLS.
    assert "transportSocket" not in parts(tree)["clusters"]["picker-admin"]
    with_tls = command("--admin-listen", "127.0.0.1:8081", "--picker-ca", "/ca", config="admin: {tls: {}}")[0]
    socket = parts(yaml.safe_load(with_tls))["clusters"]["picker-admin"]["transportSocket"]
    assert socket["typedConfig"]["commonTlsContext"]["alpnProtocols"] == ["http/1.1"]
