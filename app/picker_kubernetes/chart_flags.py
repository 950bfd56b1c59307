"""Converts the flags that Helm charts of inference gateways pass to their endpoint picker into settings.

`picker serve` accepts these chart flags, too. With `--pool-name` a replica needs no configuration file: it
uses the ports and defaults of the reference picker (of the Gateway API inference extension), and reads
everything else from Kubernetes. A chart flag without a counterpart is logged and otherwise ignored.
"""

import argparse
import hashlib
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from picker_fleet.domain.allowlist import FAIRNESS_ID, OBJECTIVE
from picker_fleet.domain.config import Settings, YamlFault, load, overlaid, read_yaml
from picker_fleet.domain.engines import series_of
from picker_fleet.domain.errors import ConfigError
from picker_kubernetes import import_config

GROUP = "inference.networking.k8s.io"
_GRPC_PORT, _HEALTH_PORT, _METRICS_PORT = 9002, 9003, 9090
_TRUE, _FALSE = ("true", "1", "t", "yes"), ("false", "0", "f", "no")
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_POOL_CHARACTERS = 64
_SERIES_FLAGS = {
    "total_queued_requests_metric": "waiting",
    "total_running_requests_metric": "running",
    "kv_cache_usage_percentage_metric": "kv_utilisation",
    "lora_info_metric": "adapters",
}


def _boolean(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port")
    return int(text)


def add_flags(parser: argparse.ArgumentParser) -> None:
    about = "flags that Helm charts of gateways pass; with --pool-name no configuration file is needed"
    add = parser.add_argument_group("in Kubernetes", about).add_argument
    add("--pool-name", metavar="NAME", help="the InferencePool whose pods are the endpoints")
    about = "the pool's namespace (default: $NAMESPACE, else the namespace of the credentials)"
    add("--pool-namespace", metavar="NAME", help=about)
    add("--pool-group", metavar="GROUP", help=f"the pool's API group; must be {GROUP}")
    add("--grpc-port", type=_port, metavar="PORT", help=f"port of ext_proc (default: {_GRPC_PORT})")
    add("--grpc-health-port", type=_port, metavar="PORT", help=f"health port (default: {_HEALTH_PORT})")
    about = f"port of metrics and the admin API (default: {_METRICS_PORT})"
    add("--metrics-port", type=_port, metavar="PORT", help=about)
    about = "serve ext_proc over TLS, self-signed unless --cert-path is set (default: true)"
    add("--secure-serving", type=_boolean, nargs="?", const=True, metavar="BOOL", help=about)
    about = "obey the conformance suite's test headers; never use this in production"
    add("--conformance", type=_boolean, nargs="?", const=True, metavar="BOOL", help=about)
    add("--cert-path", type=Path, metavar="FOLDER", help="has tls.crt and tls.key, reloaded on change")
    about = f"file with a Picker Fleet configuration, or an {import_config.KIND} to import"
    add("--config-file", type=Path, metavar="FILE", help=about)
    add("--config-text", metavar="YAML", help=f"text of an {import_config.KIND} to import")
    add("--kubeconfig", metavar="FILE", help="file of credentials, instead of $KUBECONFIG")
    for name in ("path", "port", "scheme"):
        add(f"--model-server-metrics-{name}", metavar=name.upper(), help=f"{name} of the metrics pages")
    for flag in _SERIES_FLAGS:
        add(f"--{flag.replace('_', '-')}", metavar="SERIES", help=argparse.SUPPRESS)


def given(args: argparse.Namespace) -> bool:
    """Whether an inference gateway's chart passed the flags, since such a chart sets `--pool-name`."""
    return args.pool_name is not None


def settings(args: argparse.Namespace, environ: MutableMapping[str, str]) -> tuple[Settings, list[str]]:
    """The replica's settings, and remarks for the log. Flags override environment variables, which override
    files.

    Raises:
        ConfigError: the configuration is invalid, or the flags contradict each other.
    """
    if args.kubeconfig:
        environ["KUBECONFIG"] = args.kubeconfig
    namespace = args.pool_namespace or environ.get("NAMESPACE") or environ.get("POD_NAMESPACE") or _own()
    remarks = [
        f"ignoring {flag}: this picker has no such flag" for flag in args.unknown if flag.startswith("-")
    ]
    if args.pool_group not in (None, GROUP):
        raise ConfigError(f"--pool-group {args.pool_group[:60]!r}: only pools of {GROUP} are served")
    foreign: dict[str, Any] = {}
    own = args.config
    for tree, where in _foreign_trees(args):
        if import_config.is_foreign(tree):
            result = import_config.imported(tree)
            foreign = result.tree
            remarks += [f"{where}: {remark}" for remark in result.remarks]
        elif args.config is None and args.config_file is not None:
            own = args.config_file
        else:
            raise ConfigError(f"{where}: not an {import_config.KIND}; --config takes other configurations")
    defaults = overlaid(_defaults(args.pool_name, namespace), foreign)
    found = load(own, environ, defaults=defaults, flags=_flags(args, remarks))
    trusted = ", ".join(found.extproc.trusted_headers) or "none"
    remarks.append(f"trusted client headers: {trusted} (extproc.trusted_headers); the gateway must set them")
    return found, remarks


def _own() -> str | None:
    """The namespace of this pod's service account; None outside a pod."""
    try:
        return _OWN_NAMESPACE.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _foreign_trees(args: argparse.Namespace) -> list[tuple[Mapping[str, Any], str]]:
    found = []
    for text, where in ((args.config_text, "--config-text"), (args.config_file, "--config-file")):
        if text is None:
            continue
        try:
            tree = read_yaml(text.read_text(encoding="utf-8") if isinstance(text, Path) else text)
        except (OSError, UnicodeDecodeError, YamlFault) as fault:
            raise ConfigError(f"{where}: {fault}") from fault
        if not isinstance(tree, Mapping):
            raise ConfigError(f"{where}: the top level must be a mapping")
        found.append((tree, where))
    return found


def _defaults(pool: str, namespace: str | None) -> dict[str, Any]:
    """The reference picker's defaults, as settings."""
    return {
        "pool": _key_of(f"{namespace or 'default'}.{pool}"),
        "extproc": {
            "listen": f"0.0.0.0:{_GRPC_PORT}",
            "health_listen": f"0.0.0.0:{_HEALTH_PORT}",
            "tls": {},  # gateways connect to their picker by TLS, but check no certificate
            "trusted_headers": [FAIRNESS_ID[0], OBJECTIVE[0]],
        },
        "admin": {"listen": f"0.0.0.0:{_METRICS_PORT}", "reference_metrics": True},
        "discovery": {"kubernetes": {"pool": pool, "namespace": namespace}},
        "fair_request_queue": {"overload_status": 429},
        "scheduling": {
            "fallbacks": 0,  # a gateway with an ORIGINAL_DST cluster can use only one endpoint
            "scorers": [
                {"name": "queue-depth", "weight": 2},
                {"name": "kv-cache", "weight": 2},
                {"name": "prefix-affinity", "weight": 3},
            ],
        },
    }


def _unquoted(text: str | None) -> str:
    """A flag's value without the quotes that charts write around it."""
    return (text or "").strip("\"'")


def _flags(args: argparse.Namespace, remarks: list[str]) -> dict[str, Any]:
    extproc: dict[str, Any] = {}
    tree: dict[str, Any] = {"extproc": extproc}
    for port, section, key in (
        (args.grpc_port, "extproc", "listen"),
        (args.grpc_health_port, "extproc", "health_listen"),
        (args.metrics_port, "admin", "listen"),
    ):
        if port is not None:
            tree.setdefault(section, {})[key] = f"0.0.0.0:{port}"
    if args.secure_serving is False:
        extproc["tls"] = None
    elif args.cert_path is not None:
        extproc["tls"] = {"cert": str(args.cert_path / "tls.crt"), "key": str(args.cert_path / "tls.key")}
    if args.conformance is not None:
        extproc["conformance"] = args.conformance
    series = {}
    for flag, meaning in _SERIES_FLAGS.items():
        if text := _unquoted(getattr(args, flag)):
            try:
                series_of(text)
            except ValueError as fault:
                remarks.append(f"--{flag.replace('_', '-')}: {fault}")
            else:
                series[meaning] = text
    if path := _unquoted(args.model_server_metrics_path):
        series["path"] = path
    scraping: dict[str, Any] = {"series": series} if series else {}
    if (port := _unquoted(args.model_server_metrics_port)) not in ("", "0"):
        scraping["port"] = read_yaml(port)
    if scheme := _unquoted(args.model_server_metrics_scheme):
        scraping["scheme"] = scheme
    if scraping:
        tree["scraping"] = scraping
    return tree


def _key_of(name: str) -> str:
    """The pool's name in Redis keys, which is `name`, or, if that is long, its beginning and hash."""
    if len(name) <= _POOL_CHARACTERS:
        return name
    return f"{name[: _POOL_CHARACTERS - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
