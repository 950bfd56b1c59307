"""The command `picker`, which imports a subcommand's module only to run that subcommand; `check` is here."""

import argparse
import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from picker_fleet import version
from picker_fleet.domain.errors import ConfigError, MissingExtra, PickerError

if TYPE_CHECKING:
    from picker_fleet.domain.config import Settings
    from picker_fleet.domain.request import Endpoint

_COMMANDS = {
    "up": ("picker_tools.local_fleet.up_command", "a whole fleet on this machine until Ctrl-C"),
    "serve": (
        "picker_fleet.serve",
        "one replica: picker, access log and discovery for Envoy, admin API",
    ),
    "functions": ("picker_fleet.state.functions", "load the library of Redis Functions into the server"),
    "sim": ("picker_tools.simulator.command", "one simulated model server"),
    "envoy-config": ("picker_tools.local_fleet.envoy_command", "Envoy's bootstrap on stdout"),
    "top": ("picker_tools.top.command", "the fleet on a terminal, live"),
    "load": (
        "picker_tools.load.command",
        "run a load scenario, check the fleet's guarantees, write a report",
    ),
    "import-config": (
        "picker_kubernetes.import_config",
        "convert a configuration file of the Go picker, LiteLLM or Envoy AI Gateway",
    ),
    "audit": ("picker_tools.audit.command", "replay the decision log and check the queue's guarantees"),
}
_CHECK_SUMMARY = "validate a configuration"

# Command -> the extra that installs the command's additional packages.
_EXTRAS = {"up": "local", "top": "tools", "load": "tools", "audit": "tools"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status. An error is one line on stderr. The exit status is 2 for
    an unusable configuration or a missing extra, and 1 for any other error.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    asked = next((word for word in words if not word.startswith("-")), None)
    try:
        with _naming_the_extra(asked):
            parser = _parser(asked)
            args, unknown = parser.parse_known_args(words)
            if unknown and asked != "serve":  # Helm charts of gateways give `serve` other pickers' flags
                parser.error(f"unrecognized arguments: {' '.join(unknown)}")
            args.unknown = unknown
            status: int = args.run(args)
    except PickerError as fault:
        print(fault, file=sys.stderr)
        return 2 if isinstance(fault, ConfigError | MissingExtra) else 1
    except KeyboardInterrupt:  # Ctrl-C before the command handles signals
        return 130
    except BrokenPipeError:  # the reader of stdout has exited, as in `picker envoy-config | head`
        sys.stderr.close()
        return 1
    return status


@contextlib.contextmanager
def _naming_the_extra(command: str | None) -> Iterator[None]:
    """Raise MissingExtra if `command` imports a package that only an extra installs."""
    try:
        yield
    except ModuleNotFoundError as fault:
        package = (fault.name or "").partition(".")[0]
        if command not in _EXTRAS or package.startswith("picker_"):
            raise
        raise MissingExtra(
            f"picker {command} needs {package}, which is not installed: "
            f"pip install 'picker-fleet[{_EXTRAS[command]}]'"
        ) from None


def _parser(asked: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="picker", description="A fleet of endpoint pickers for LLM inference behind Envoy."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module_name, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name == asked:
            module = _imported(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    check = commands.add_parser("check", help=_CHECK_SUMMARY, description=_CHECK_SUMMARY)
    check.add_argument("file", type=Path, metavar="FILE", help="the configuration to validate")
    check.set_defaults(run=_check)
    return parser


def _imported(name: str) -> ModuleType:
    """Import the module `name` with the garbage collector off. The collector would take a third of the
    start-up time and free nothing, since modules keep their objects.
    """
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def _check(args: argparse.Namespace) -> int:
    """Validate a configuration. Prints a summary and exits with 0, or prints faults on stderr, exits with 2.

    Environment variables `PICKER_…` override the file, as for a replica.
    """
    # Import modules of the configuration only here: they load slowly, and other commands may not need them.
    from picker_fleet.domain.config import load, pools_of

    try:
        settings = load(args.file, os.environ)
        if faults := [fault for each in pools_of(settings).values() for fault in _faults_of_files(each)]:
            raise ConfigError("\n".join(faults))
    except ConfigError as fault:
        print(fault, file=sys.stderr)
        return 2
    print(f"{args.file}: valid")
    for each in pools_of(settings).values():
        print("\n".join(_summary(each)))
    return 0


def _faults_of_files(settings: "Settings") -> Iterator[str]:
    """The faults in the files of endpoints and tenants that `settings` name."""
    from picker_fleet.endpoints.discovery import WatchedFile, source_of
    from picker_fleet.fleet.tenant_nodes import nodes_file

    endpoints = None if settings.discovery.file is None else source_of(settings.discovery)
    for source in (endpoints, nodes_file(settings)):
        if isinstance(source, WatchedFile) and (fault := source.fault()):
            yield fault


def _summary(settings: "Settings") -> list[str]:
    """The lines that the command `check` prints for a pool."""
    from picker_fleet.domain.allowlist import FAIRNESS_ID, trusted

    bounds = settings.request_queue_controller
    queue = settings.fair_request_queue
    if bounds.is_adaptive:
        found = f"found by the fleet, {bounds.initial_limit} {bounds.unit} each at first"
    else:
        found = (
            f"lower {bounds.lower_per_backend:g}, watermark {bounds.watermark_per_backend:g}, "
            f"upper {bounds.upper_per_backend:g} {bounds.unit}\n    {bounds.why_static or 'static'}"
        )
    if bounds.ignored:
        found += f"\n    without effect in this mode: {', '.join(bounds.ignored)}"
    tenants, named = settings.tenants, "only by models, since extproc.trusted_headers lacks the fairness id"
    if tenants is not None and tenants.headers:
        named = f"by {', '.join(tenants.headers)}"
    elif queue.flow_key != "model" and trusted(settings.extproc.trusted_headers).intersection(FAIRNESS_ID):
        named = "by the fairness id"
    return [
        f"  pool: {settings.pool}",
        f"  endpoints: {_endpoints_of(settings)}",
        f"  limits per backend: {found}",
        f"  queue: {queue.total_capacity} requests, {queue.flow_capacity} a flow, {queue.queue_ttl:g} s each",
        *([] if tenants is None else [f"  tenants: named {named}"]),
    ]


def _endpoints_of(settings: "Settings") -> str:
    from picker_fleet.endpoints.discovery import endpoints_of
    from picker_fleet.endpoints.stages import serving

    discovery, scheduling = settings.discovery, settings.scheduling
    if discovery.file is not None:
        return f"file {discovery.file}"
    if discovery.dns is not None:
        return f"dns {discovery.dns.name}, port {discovery.dns.port}"
    if discovery.kubernetes is not None:
        named = discovery.kubernetes
        return f"InferencePool {named.pool}, namespace {named.namespace or 'of the credentials'}"
    listed = endpoints_of(discovery.static or ())
    serve: list[Endpoint] = []
    serving(scheduling.endpoint_labels, scheduling.stages, serve.extend)(listed)
    stages = {
        "decode": sum(each.decodes for each in serve),
        "prefill": sum(each.prefills for each in serve),
        "encode": sum(each.encodes for each in serve),
        "get no requests": len(listed) - len(serve),
    }
    told = ", ".join(f"{count} {what}" for what, count in stages.items() if count or what == "decode")
    return f"static, {len(listed)} listed: {told}" if listed else "none"


class _Version(argparse.Action):
    """The option `--version`. Only this option reads the package's metadata, since reading them is slow."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"picker {version()}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
