"""What `picker up` tells its user: one line a part, with colour only on a terminal."""

import sys


class Report:
    """Lines on stdout, each written out at once."""

    def __init__(self) -> None:
        self._console = None
        if sys.stdout.isatty():
            from rich.console import Console

            self._console = Console(highlight=False)

    def ready(self, name: str, where: str) -> None:
        self._say("ready", "green", name, where)

    def trouble(self, name: str, what: str) -> None:
        self._say("DOWN", "red", name, what)

    def text(self, text: str) -> None:
        """Text as it is, to be copied."""
        if self._console is None:
            print(text, flush=True)
        else:
            self._console.print(text, markup=False, soft_wrap=True)

    def _say(self, word: str, colour: str, name: str, text: str) -> None:
        if self._console is None:
            print(f"{word:<6}{name:<12} {text}", flush=True)
        else:
            self._console.print(f"[{colour}]{word:<6}[/]{name:<12} ", end="")
            self._console.print(text, markup=False, soft_wrap=True)
