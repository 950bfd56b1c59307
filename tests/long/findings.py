"""Collects the checks of a long test and writes its report."""

from bench.rig.report import describe_run, table


class Findings:
    """Collects checks, which are printed at once, and further parts of the report."""

    def __init__(self, command: str) -> None:
        self._about = describe_run(command)
        self._checks: list[list[str]] = []
        self._parts: list[str] = []
        self._failed = 0

    @property
    def all_held(self) -> bool:
        """Whether at least one check ran, and no check failed."""
        return bool(self._checks) and not self._failed

    def check(self, what: str, passed: bool, seen: str = "") -> None:
        self._failed += not passed
        self._checks.append([what, "yes" if passed else "**no**", seen.replace("|", "/").replace("\n", " ")])
        print(f"{'held' if passed else 'DID NOT HOLD'}: {what}{f': {seen}' if seen else ''}", flush=True)

    def add(self, text: str) -> None:
        """Add Markdown text to the report."""
        self._parts.append(text.strip())

    def text(self, title: str) -> str:
        """The report as Markdown; the last line says whether all checks held."""
        count = len(self._checks)
        verdict = (
            f"All {count} checks held." if self.all_held else f"{self._failed} of {count} checks failed."
        )
        checks = table(["check", "held", "seen"], self._checks)
        return "\n\n".join([f"# {title}", self._about, *self._parts, checks, verdict]) + "\n"
