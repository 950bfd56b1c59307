"""Numbers in the documentation are those of the code."""

import re
from pathlib import Path

import pytest
from picking_table import TABLE

from picker_fleet import intake
from picker_fleet.admin import api, documents, events, fleet_state
from picker_fleet.admin.server import LIMITS
from picker_fleet.admission import shared_gate
from picker_fleet.endpoints import metrics_page as endpoint_page
from picker_fleet.endpoints import scraper
from picker_fleet.failover import local_gate, outage
from picker_fleet.failover.gate import FailoverTimes
from picker_fleet.replica import heartbeat
from picker_fleet.scheduling import endpoint_history as history
from picker_fleet.state import batching, error_replies, reads
from picker_fleet.telemetry import series
from picker_tools.local_fleet import envoy, listener

ROOT = Path(__file__).parents[2]


def lua(path: str, name: str) -> int:
    """The integer constant of a script."""
    found = re.search(rf"^ *local {name} = (\d+)", (ROOT / "lua" / path).read_text(), re.MULTILINE)
    assert found is not None, f"lua/{path} has no {name}"
    return int(found[1])


def spaced(number: int) -> str:
    """As the documentation writes numbers of five digits and more."""
    return f"{number:,}".replace(",", " ")


CHUNK, WALKS = lua("sweep.lua", "CHUNK"), lua("sweep.lua", "WALKS")
LATE_S = shared_gate._EXPIRY_SLACK_S + shared_gate._EXPIRY_ANSWER_S
SENTENCES = [
    ("architecture", f"one that dies meanwhile is waited for {reads.CLAIM_MS / 1000:g} s"),
    ("architecture", f"within its TTL and {LATE_S:g} s"),
    ("redis-schema", f"or {reads.CLAIM_MS / 1000:g} s if it came to no end"),
    ("redis", f"a script call carries {batching.MAX_BATCH} requests at most"),
    ("fairness", f"takes {CHUNK} requests a call and at most {WALKS} calls an interval"),
    ("fairness", f"with up to {CHUNK * WALKS} requests waiting"),
    ("fairness", f"files {lua('sweep.lua', 'REFILED')} requests a call anew"),
    ("fairness", f"the {lua('lib/queue.lua', 'GUARD_LOOKS_AT')} most overdue"),
    ("admin-api", f"No script looks at more than {reads.CHUNK} rows"),
    ("admin-api", f"`limit` is 1 to {api.MAX_LIMIT}"),
    ("admin-api", f"a page has at most {api.MAX_ROWS} rows"),
    ("admin-api", f"goes by the first {fleet_state.MAX_FLOWS}"),
    ("admin-api", f"It takes {events.MAX_LISTENERS} listeners"),
    ("admin-api", f"{LIMITS.connections} connections, {LIMITS.connections // 2} of one address"),
    ("admin-api", f"not whole {LIMITS.request_s:g} s after"),
    (
        "admin-api",
        f"not read for {LIMITS.stalled_s:g} s, more than {LIMITS.overhead_bytes // 1024} KiB of headers",
    ),
    ("admin-api", f"more than {LIMITS.pipelined} requests that wait behind one another"),
    ("admin-api", f"has read one page {documents.MAX_METRICS_READS} times"),
    ("metrics", f"at most {spaced(series._MAX_SERIES)} series ({series._MAX_HISTOGRAMS} of a histogram)"),
    ("metrics", f"up to {documents.MAX_METRICS_AGE_S:g} s where making it took"),
    ("security", f"Half-sent headers end after {listener._HEADERS_S:g} s"),
    ("security", f"at most {spaced(envoy.MAX_CONNECTIONS)} connections"),
    ("security", f"at most {intake.MAX_NAME_BYTES} bytes, no control characters"),
    ("without-redis", f"are waited for {FailoverTimes().max_resync_s:g} s at most"),
    ("without-redis", f"it waits {FailoverTimes().peers_wait_s:g} s at most"),
    ("without-redis", f"{spaced(outage.MAX_ENTRIES)} requests and as many ends are remembered"),
    ("without-redis", f"is left alone for {local_gate._FAILED_S:g} s"),
    ("operations", f"waiting requests poll, {heartbeat._MAX_POLL_S:g} s later"),
    ("errors", f"{error_replies._LOG_LINES_PER_S} lines a second at most"),
    ("errors", f"is asked once more after {batching._DENIED_RETRY_S * 1000:g} ms"),
    ("picking", f"each endpoint is probed every {scraper.PROBE_S:g} s"),
    ("picking", f"A page has at most {endpoint_page.MAX_PAGE_BYTES // 1024} KiB"),
    (
        "picking",
        f"blocks of {history.BLOCK_BYTES} bytes, the first {history.MAX_PROMPT_BYTES // 1024} KB",
    ),
    (
        "picking",
        f"{spaced(history.BLOCKS_PER_ENDPOINT)} blocks an endpoint, {spaced(history.MAX_BLOCKS)} in all",
    ),
    ("picking", f"in `tests/fleet/picking_table.py`: {len(TABLE)} of them"),
    ("guarantees", f"{len(TABLE)} cases from headers"),
]


@pytest.mark.parametrize(("page", "sentence"), SENTENCES)
def test_a_number_on_a_page_is_that_of_the_code(page: str, sentence: str) -> None:
    text = " ".join((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").split())
    assert sentence in text, f"docs/{page}.md does not say: {sentence}"
