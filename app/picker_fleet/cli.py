"""The command `picker`. Each subcommand's module is imported only when it is asked for."""

import argparse
import gc
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from picker_fleet.errors import ConfigError, PickerError

_COMMANDS = {
    "up": ("picker_tools.local_fleet.up_command", "a whole fleet on this machine until Ctrl-C"),
    "serve": (
        "picker_fleet.replica_command",
        "one replica: picker, access log and discovery for Envoy, admin API",
    ),
    "sim": ("picker_tools.simulator.command", "one simulated model server"),
    "envoy-config": ("picker_tools.local_fleet.envoy_command", "Envoy's bootstrap on stdout"),
    "top": ("picker_tools.top.command", "the fleet on a terminal, live"),
    "load": (
        "picker_tools.load.command",
        "run a load scenario, judge it by the fleet's promises, write a report",
    ),
    "audit": ("picker_tools.audit.command", "replay the decision log and check what the queue promises"),
    "check": ("picker_fleet.check_command", "validate a configuration"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit status. Faults are on stderr, one line each: 2 for configuration, else 1."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        args = _parser(words).parse_args(words)
        status: int = args.run(args)
    except PickerError as fault:
        print(fault, file=sys.stderr)
        return 2 if isinstance(fault, ConfigError) else 1
    except KeyboardInterrupt:  # before a command that handles it was running
        return 130
    except BrokenPipeError:  # `picker envoy-config | head`
        sys.stderr.close()
        return 1
    return status


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="picker", description="A fleet of endpoint pickers for LLM inference behind Envoy."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked = next((word for word in words if not word.startswith("-")), None)
    for name, (module_name, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name == asked:
            module = _imported(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def _imported(name: str) -> ModuleType:
    """The module `name`. What modules make stays, so nothing looks for garbage in it: that would take a third
    of a start.
    """
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


class _Version(argparse.Action):
    """Tells the version, for which alone it reads the package's metadata."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"picker {version('picker-fleet')}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
