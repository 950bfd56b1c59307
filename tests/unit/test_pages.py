"""The documentation agrees with the code: numbers, settings, faults, alerts, links and named files."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import yaml
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
from picking_table import TABLE

from picker_fleet import cli
from picker_fleet.admin import api, documents, events, fleet_state, protection, tenants
from picker_fleet.admin.server import LIMITS
from picker_fleet.admin.views import BadCursor
from picker_fleet.admission import ledger, local_gate, shared_queue
from picker_fleet.admission.failover import FailoverTimes
from picker_fleet.domain import errors, units
from picker_fleet.domain.config import Settings
from picker_fleet.domain.sections import Model, Section
from picker_fleet.endpoints import metrics_page as endpoint_page
from picker_fleet.endpoints import pacing
from picker_fleet.fleet import heartbeat, limit_controller, usage
from picker_fleet.fleet.live_config import LIVE
from picker_fleet.ingress.context import DROPPED_REASON, refusal
from picker_fleet.ingress.ext_proc import codec
from picker_fleet.scheduling import endpoint_history as history
from picker_fleet.state import batching, reads
from picker_fleet.state.error_replies import ERROR_REPLIES
from picker_fleet.telemetry import metrics
from picker_tools.local_fleet import bootstrap

ROOT = Path(__file__).parents[2]


def text_of(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def lua(path: str, name: str) -> int:
    """The value of an integer constant in a Lua file."""
    found = re.search(rf"^ *local {name} = (\d+)", (ROOT / "lua" / path).read_text(), re.MULTILINE)
    assert found is not None, f"lua/{path} has no {name}"
    return int(found[1])


def spaced(number: int) -> str:
    """`number` as in the documentation: with spaces between groups of three digits."""
    return f"{number:,}".replace(",", " ")


CHUNK, WALKS = lua("sweep.lua", "CHUNK"), lua("sweep.lua", "WALKS")
MANAGER = bootstrap._parts()["manager"]
LATE_S = shared_queue._EXPIRY_SLACK_S + shared_queue._EXPIRY_ANSWER_S
SENTENCES = [
    ("architecture", f"replica dies meanwhile, they wait {reads.SnapshotTimes().claim_ms / 1000:g} s"),
    ("architecture", f"within its TTL and {LATE_S:g} s"),
    ("redis-schema", f"or {reads.SnapshotTimes().claim_ms / 1000:g} s if it never ended"),
    ("limits", f"the KV cache is {limit_controller._KV_NEAR * 100:g} % full | ceases to double"),
    ("limits", f"at most those that end within {limit_controller._SLACK_S:g} s"),
    ("limits", f"falls to {limit_controller._CUT:g} of the running"),
    ("limits", f"the limit stays for {limit_controller._FIRST_PAUSE_S:g} s."),
    ("limits", f"to at most {limit_controller._LONGEST_PAUSE_S:g} s. A page read less than"),
    ("limits", f"less than {limit_controller._SETTLED_S:g} s after a change"),
    ("redis", f"a script call carries {batching.MAX_BATCH} requests at most"),
    ("fairness", f"for {CHUNK} waiting requests a call, in at most {WALKS} calls an interval"),
    ("fairness", f"with up to {CHUNK * WALKS} requests waiting"),
    ("fairness", f"sorts {lua('sweep.lua', 'REFILED')} requests a call again"),
    ("fairness", f"the {lua('lib/flows.lua', 'GUARD_LOOKS_AT')} most overdue"),
    ("admin-api", f"No script looks at more than {reads.CHUNK} rows"),
    ("admin-api", f"`limit` is 1 to {api.MAX_LIMIT}"),
    ("admin-api", f"a page has at most {api.MAX_ROWS} rows"),
    ("admin-api", f"uses data of the first {fleet_state.MAX_FLOWS}"),
    ("admin-api", f"and a page of {tenants.PAGE} children"),
    ("admin-api", f"keep up to {spaced(usage.MOST_ROWS)} rows each"),
    ("admin-api", f"An hour has at most {spaced(lua('count_usage.lua', 'MOST_ROWS'))} rows"),
    ("admin-api", f"kept for {lua('count_usage.lua', 'KEPT_HOURS') // 24} days, and at most"
     f" {spaced(lua('count_usage.lua', 'MOST_IN_ALL'))} rows"),
    ("metrics",
     f"shows up to {metrics.MOST_TENANTS} nodes with settings of their own, {reads.CHUNK} a heartbeat"),
    ("admin-api", f"A replica accepts {events.MAX_LISTENERS} listeners"),
    ("admin-api", f"{LIMITS.connections} connections, {LIMITS.connections // 2} of one address"),
    ("admin-api", f"not whole {LIMITS.request_s:g} s after"),
    ("admin-api",
     f"not read for {LIMITS.stalled_s:g} s, more than {LIMITS.overhead_bytes // 1024} KiB of headers"),
    ("admin-api", f"more than {LIMITS.pipelined} requests that wait behind one another"),
    ("admin-api", f"has read one page {documents.MAX_METRICS_READS} times"),
    ("metrics", f"at most {spaced(metrics._MAX_SERIES)} series ({metrics._MAX_HISTOGRAMS} of a histogram)"),
    ("metrics", f"up to {documents.MAX_METRICS_AGE_S:g} s if making the page took"),
    ("security", f"Half-sent headers end after {MANAGER['requestHeadersTimeout'].removesuffix('s')} s"),
    ("security", f"at most {spaced(bootstrap.MAX_CONNECTIONS)} connections"),
    ("security", f"at most {units.MAX_NAME_BYTES} bytes, no control characters"),
    ("redis", f"wait at most {FailoverTimes(0.0).max_resync_s:g} s for a replica"),
    ("redis", f"it waits {FailoverTimes(0.0).peers_wait_s:g} s at most"),
    ("redis", f"{spaced(ledger.MAX_ENTRIES)} requests, running or ended, are remembered"),
    ("redis", f"gets no request for {local_gate._FAILED_S:g} s"),
    ("operations", f"waiting requests poll, {heartbeat._MAX_POLL_S:g} s later"),
    ("errors", f"is asked once more after {batching._DENIED_RETRY_S * 1000:g} ms"),
    ("picking",
     f"each endpoint is probed every {pacing.PROBE_S:g} s, and every {pacing.REST_PROBE_S:g} s at rest"),
    ("picking", f"At most {endpoint_page._MOST_WORK // 2**20} MiB of a page"),
    ("picking", f"remembers the first {history.MAX_PROMPT_BYTES // 1024} KB"),
    ("protocol", f"cut into blocks of {history.BLOCK_BYTES} bytes"),
    ("picking", f"keeps {spaced(history.MAX_BLOCKS)} blocks, at most 125 MB"),
    ("picking", f"else {spaced(history.BLOCKS_PER_ENDPOINT)} blocks."),
    ("guarantees", f"{len(TABLE)} cases from headers"),
]  # fmt: skip


def test_numbers_on_documentation_pages_equal_the_constants_in_the_code() -> None:
    for page, sentence in SENTENCES:
        assert sentence in " ".join(text_of(page).split()), f"docs/{page}.md does not say: {sentence}"


CODE = re.compile(r"`([a-z_]+)`")


def table(section: str) -> list[list[str]]:
    """The cells of each row of the first table under `## section`."""
    text = text_of("errors").split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [row for row in rows if len(row) > 3][2:]


def faults(of: type[errors.RequestError] = errors.RequestError) -> Iterator[type[errors.RequestError]]:
    """Every fault in picker_fleet.domain.errors that can be a client's answer."""
    if of.__module__ == "picker_fleet.domain.errors" and of not in (
        errors.Dropped,
        errors.StateFault,
    ):  # base classes
        yield of
    for one in of.__subclasses__():
        yield from faults(one)


@pytest.mark.parametrize("fault", list(faults()), ids=lambda fault: fault.code)
def test_the_answer_to_each_fault_equals_its_row_in_errors_md(fault: type[errors.RequestError]) -> None:
    row = {CODE.findall(cells[0])[0]: cells for cells in table("What clients get")}.get(fault.code)
    assert row is not None, f"docs/errors.md does not tell of {fault.code}"
    refused = refusal(fault("why"), 503, 0.0)
    answer = ProcessingResponse.FromString(codec.refused(refused, fault.code)).immediate_response
    headers = {option.header.key: option.header.raw_value.decode() for option in answer.headers.set_headers}
    error = orjson.loads(answer.body)["error"]
    _, status, kind, reason, *_ = row
    assert status == f"{int(answer.status.code)}" + ("¹" if issubclass(fault, errors.Dropped) else "")
    assert kind == f"`{error['type']}`"
    assert reason.strip("`") == headers.get(DROPPED_REASON, "–")
    assert ("retry-after" in headers) == status.startswith(("503", "429"))


def test_errors_md_lists_exactly_the_faults_in_the_code() -> None:
    listed = [CODE.findall(cells[0])[0] for cells in table("What clients get")]
    assert sorted(listed) == sorted(fault.code for fault in faults())


def test_error_replies_of_redis_have_the_meanings_that_errors_md_gives() -> None:
    rows = table("What Redis answers")
    listed = [(prefix, cells[1]) for cells in rows for prefix in re.findall(r"`([^`]+)`", cells[0])]
    assert sorted(listed) == sorted((prefix.strip(), f"`{meaning}`") for prefix, meaning in ERROR_REPLIES)
    assert "`item`" in [cells[1] for cells in rows]


def calls(folder: str = ".") -> Iterator[ast.Call]:
    """The syntax node of every function call in the source of a folder of picker_fleet."""
    for file in sorted((ROOT / "app" / "picker_fleet" / folder).rglob("*.py")):
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        yield from (node for node in nodes if isinstance(node, ast.Call))


def admin_codes() -> Iterator[tuple[str, str]]:
    """Code and status of each fault in the source of the admin API."""
    for call in calls("admin"):
        if getattr(call.func, "id", "") in ("Refused", "_problem"):
            given = [each.value for each in call.args if isinstance(each, ast.Constant)]
            numbers = [value for value in given if isinstance(value, int)]
            codes = [value for value in given if isinstance(value, str)]
            if numbers and codes:
                yield codes[0], str(numbers[0])
    yield from ((code, str(status)) for status, code in protection._CODES.items())
    for fault in (
        BadCursor,
        errors.StateUnavailable,
        errors.WritesRefused,
        errors.OtherFormat,
        errors.ScriptFailed,
    ):
        yield fault.code, str(fault.status)


def test_errors_md_lists_exactly_the_error_codes_of_the_admin_api() -> None:
    listed = {(CODE.findall(cells[0])[0], cells[1]) for cells in table("The admin API")}
    of_parameters = {("bad_limit", "422"), ("bad_band", "422")}
    found = set(admin_codes())
    assert ("bad_config", "422") in found, "no call in the source was recognised"
    assert listed - of_parameters == found
    assert of_parameters <= listed


def test_errors_md_has_the_exit_codes_of_every_command() -> None:
    commands = [f"`picker {name}`" for name in (*cli._COMMANDS, "check")]
    assert sorted(cells[0] for cells in table("Exit codes")) == sorted(commands)


PAGES = [
    ROOT / "docs" / f"{name}.md" for name in ("operations", "errors", "specification", "tuning", "upgrading")
]
LINKED = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]*))?\)")
SECTIONS = "|".join(name for name, field in Settings.model_fields.items() if name != "pool")
KEY = re.compile(rf"`((?:{SECTIONS})(?:\[\])?\.[a-z_.]+)`")


def keys(of: type[Section], before: str = "") -> Iterator[str]:
    """Every key of the settings below the section `of`, its parts joined by dots."""
    for name, field in of.model_fields.items():
        yield before + name
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from keys(kind, f"{before}{name}.")


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_links_on_documentation_pages_have_existing_targets() -> None:
    for page in LINKED:
        for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
            if "://" not in target:
                found = (page.parent / target).resolve() if target else page
                assert found.exists(), (page.name, target)
                assert not anchor or anchor in anchors(found), f"{page.name}: {target}#{anchor}"


FILE = re.compile(r"`((?:app|bench|deploy|examples|lua|tests)/[\w./-]+)(?:::(\w+))?`")
EXAMPLES = ("lua/flow_length.lua", "bench/results/faults/CASE/")  # these paths are not in the repository


def test_files_and_tests_that_a_documentation_page_names_exist() -> None:
    for page in LINKED:
        for path, test in FILE.findall(page.read_text(encoding="utf-8")):
            assert path in EXAMPLES or (ROOT / path).exists(), (page.name, path)
            code = (ROOT / path).read_text(encoding="utf-8") if test else ""
            assert not test or re.search(rf"def {test}\(", code), f"{page.name}: {path}::{test}"


CITED = re.compile(r'docs/([\w-]+)\.md, "([^"\n]+)"')


def test_sections_of_documentation_pages_that_the_code_cites_exist() -> None:
    sources = [ROOT / "CHANGELOG.md", *(ROOT / "app").rglob("*.py"), *(ROOT / "deploy").rglob("*.yaml")]
    cited = {each for file in sources for each in CITED.findall(file.read_text(encoding="utf-8"))}
    assert len(cited) > 3
    for page, title in cited:
        assert re.search(rf"^(#+ |\*\*){re.escape(title)}", text_of(page), re.MULTILINE), f"{page}: {title}"


def test_settings_that_a_documentation_page_names_exist() -> None:
    for page in PAGES:
        named = {key.replace("[]", "") for key in KEY.findall(page.read_text(encoding="utf-8"))}
        assert named, page.name
        assert named <= set(keys(Settings)), page.name


def test_operations_md_names_every_alert_once() -> None:
    groups = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules" / "alerts.yml").read_text())["groups"]
    alerts = [rule["alert"] for group in groups for rule in group["rules"]]
    listed = re.findall(r"^\| `(Picker\w+)` \|", text_of("operations"), re.MULTILINE)
    assert sorted(listed) == sorted(alerts)


def warnings() -> Iterator[str]:
    """The format string of each warning and error that a replica logs."""
    for call in calls():
        if getattr(call.func, "attr", "") not in ("warning", "error", "exception"):
            continue
        if ast.unparse(call.func).startswith("_log."):
            first = call.args[0]
            assert isinstance(first, ast.Constant)
            yield str(first.value)


def test_operations_md_has_every_warning_of_the_log() -> None:
    page = text_of("operations").split("\n## The log\n", 1)[1]
    found = list(warnings())
    assert len(found) > 15
    for warning in found:
        part = max(re.split(r"%\w+|[:;(]", warning), key=len).strip()
        assert part in page, warning


SPECIFICATION = text_of("specification")


def test_every_statement_of_the_specification_has_code_and_a_test_or_a_reason() -> None:
    lines = [line for line in SPECIFICATION.splitlines() if line.startswith("| ")]
    rows = [line.strip("|").split(" | ") for line in lines if "| where |" not in line]
    assert len(rows) > 100
    for cells in ([cell.strip() for cell in row] for row in rows):
        assert len(cells) >= 3, cells
        statement, where, test, *differs = cells
        assert statement
        assert where.startswith(("`", "–")), cells
        reason = differs[0].strip("| ") if differs else ""
        assert "tests/" in test or reason, f"neither a test nor a reason: {statement}"


TUNED = ("fair_request_queue", "request_queue_controller", "workloads", "scheduling", "scraping", "leases")
ROWS = [line.split("|")[1] for line in text_of("tuning").splitlines() if line.startswith("| `")]


def tuned() -> list[tuple[str, str]]:
    """Section and key of each setting that docs/tuning.md must list."""
    sections = Settings()
    found = [(name, key) for name in TUNED for key in type(getattr(sections, name)).model_fields]
    return found + [("models[]", key) for key in Model.model_fields if key != "name"]


def test_a_key_of_the_settings_has_a_row_that_says_whether_the_key_is_live() -> None:
    for section, key in tuned():
        # The first cell of a row names a key with its section, and may list more keys of that section.
        cell = next((cell for cell in ROWS if f"`{section}." in cell and f"{key}`" in cell), None)
        assert cell is not None, f"docs/tuning.md has no row for {section}.{key}"
        assert ("*live*" in cell) == (f"{section}.{key}" in LIVE), f"{section}.{key}"
