"""Defines the names and layouts that Python and Lua share: states, modes, refusals, records, rows.

The loader (state/scripts.py) adds `lua_source()` to the library when it assembles it: constants become locals
of the library, layouts become functions that pack and unpack. Script calls do no extra work for the schema.

FORMAT is the version of this schema and of the keys (lua/lib/storage.lua). docs/upgrading.md says which
changes need the next FORMAT number.
"""

import enum
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import get_args

from picker_fleet.domain.bands import BandPolicy, Fairness, Ordering, Overload, WaitSignal
from picker_fleet.domain.units import LEAST_WEIGHT, MOST_COST, MOST_WEIGHT

# The format of a pool's state. A replica neither reads nor changes a pool of another format, or of none.
FORMAT = 1


class Refusal(enum.StrEnum):
    """Why the shared queue refuses a request."""

    NO_ENDPOINTS = "no-endpoints"
    SATURATED = "saturated"
    INSUFFICIENT_FLOW_CAPACITY = "insufficient-flow-capacity"
    TOO_MANY_FLOWS = "too-many-flows"
    BAND_CAPACITY = "band-capacity"
    BAND_BYTES = "band-bytes"
    TOTAL_CAPACITY = "total-capacity"
    OVER_LIMIT = "over-limit"
    OVER_BURST = "over-burst"


# The notifications that a replica gets about its own requests. `placed`: the request is granted and placed.
# `refused`: the request expired while it waited for a tenant's limit.
NOTIFICATIONS = ("granted", "placed", "expired", "refused", "preempted", "evicted")
# The states of a request in the pool, numbered from 1. `orphaned`: queued by a replica that is silent.
STATES = ("queued", "orphaned", "granted", "placed")
WAITING_STATES = 2  # requests in the first two states wait: their records have no endpoints, stock or tag

# UNPICKABLE is added to the load of an endpoint that takes no new requests.
UNPICKABLE = 10**9
# Rows that one call returns: a page of fifty, and one more that shows whether another page follows.
VIEW_LIMIT = 51

# The layout of an arrival, packed by `store.pack_arrival`: texts that end in byte 0, then doubles.
ARRIVAL_TEXTS = ("id", "attempt", "flow", "workload", "model", "candidates", "prefill")
ARRIVAL_NUMBERS = (
    "priority", "weight", "cost", "ttl_ms", "age_ms", "criticality", "limit", "learn", "bytes",
    "prompt_tokens", "answer_tokens",
)  # fmt: skip
# The fields of an accounting token (state/accounting_token.py), joined by tabs; optional fields follow.
ACCOUNTING_TOKEN = (
    "flow", "band", "weight", "cost", "workload", "criticality", "model", "endpoint", "limit",
)  # fmt: skip
ADMITTED_ALONE = "alone="  # prefix of an optional field: time of an admission without Redis
PROMPT_SIZE = "prompt="  # prefix of an optional field: the size of the prompt's text (ingress/cost.py)
# Prefix of an optional field: the priority of a band without a name; `band` then has the nearest named band.
OTHER_PRIORITY = "priority="
# Prefix of an optional field: the endpoint's load when a streamed request was placed; Lua ignores it.
PLACED_LOAD = "load="
# Prefix of an optional field of a split request: its prefill endpoint, and the load there.
PREFILL = "prefill="
# A request's record: field -> format in `struct`. A waiting request has only the fields before `endpoints`.
# Until the request is placed, RECORD_BYTES may follow: the size of the request's body and the epoch that
# counts it; then, while the request waits, a byte 1 if its grant may place it on any endpoint. If neither the
# size nor the byte is set, both are absent. While another endpoint computes the prompt of a placed request,
# its record ends in the text of the prefill endpoints, best first. With tenants, a record that was charged or
# has waited has all parts, then RECORD_CHARGE (lua/lib/quotas.lua), and 4 is added to its state's number;
# else `tenancy` is 0.
RECORD = {
    "owner": "s", "attempt": "s", "flow": "s", "band": "B", "weight": "d", "cost": "d", "workload": "s",
    "criticality": "B", "model": "s", "arrived": "d", "deadline_ms": "d", "limit": "H",
    "endpoints": "s", "taken": "d", "tag": "d",
}  # fmt: skip
_RUNNING_ONLY = 3  # the last fields of RECORD, which only granted and placed requests have
RECORD_BYTES = {"bytes": "I", "bytes_epoch": "I"}
RECORD_CHARGE = {
    "tenancy": "d", "demoted": "B", "charged_prompt": "d", "charged_answer": "d", "charged": "s",
}  # fmt: skip
MOST_BYTES = 2**32 - 1  # the largest value of format "I"
WAITING_LAYOUT = "B" + "".join(list(RECORD.values())[:-_RUNNING_ONLY])
RUNNING_LAYOUT = "B" + "".join(RECORD.values())
CHARGED_LAYOUT = RUNNING_LAYOUT + "".join(RECORD_BYTES.values()) + "Bs" + "".join(RECORD_CHARGE.values())
# Counters of the pool, packed as doubles. Add new counters at the end: that needs no new FORMAT.
COUNTERS = (
    "epoch", "stock", "queued", "seq", "dispatches", "guards", "ended", "log_seq",
    "queued:0", "queued:1", "queued:2", "ready", "upper", "lower", "v:0", "v:1", "v:2",
    "band:0", "band:1", "band:2", "bv", "credit", "overdue", "rate", "refiling", "pressed",
    "new:0", "new:1", "new:2", "moved", "outliers", "prefillers", "prefill_only",
)  # fmt: skip
# Script -> the arguments of each item in a batch.
ITEMS = {
    "tombstone": ("id", "ago_ms"),
    "note_origin": ("id", "endpoint"),
    "prefilled": ("id",),
    "renew": ("id", "attempt", "serving_endpoint", "accounting_token", "ago_ms"),
    "report_client_gone": ("id",),
    "report_fault": ("id", "endpoint", "flow", "why", "hold_ms"),
    "settle": ("id", "outcome", "cost", "answer_tokens", "prompt_size", "usage"),
    "place": ("id", "attempt", "candidates", "prefill"),
    "acknowledge": ("id", "attempt"),
    "cancel": ("id", "attempt", "why"),
    "mark_endpoint": ("address", "mark", "on"),
}
# Rows of the admin API's reads (state/reads.py): field -> its format; byte 31 separates fields.
FLOW_QUEUE_ROW = {
    "throttled": "%d", "priority": "%d", "name": "%s", "start": "%s", "queued": "%d", "arrived_us": "%.17g",
    "weight": "%.17g", "share": "%.17g", "in_flight": "%s",
}  # fmt: skip
REQUEST_ROW = {
    "id": "%s", "state": "%s", "owner": "%s", "flow": "%s", "priority": "%d", "workload": "%s", "model": "%s",
    "criticality": "%d", "cost": "%.17g", "arrived_us": "%.17g", "deadline_ms": "%.17g", "due_ms": "%.17g",
    "overdue": "%d", "endpoints": "%s", "limit": "%.17g", "wait_score": "%s", "criticality_score": "%s",
    "rate_score": "%s", "prefillers": "%s",
}  # fmt: skip
WORKLOAD_ROW = {
    "id": "%s", "total": "%.17g", "active": "%.17g", "dispatched": "%.17g", "average_wait_ms": "%.17g",
    "last_request_ms": "%.17g", "rate": "%.17g",
}  # fmt: skip
_BYTE_31 = r"\31"  # the escape sequence of this byte in Lua


def lua_source() -> str:
    """This schema as Lua source, to be put after `lua/lib/storage.lua`."""
    return "-- From app/picker_fleet/state/schema.py.\n" + "\n".join((*_constants(), *_functions())) + "\n"


def _constants() -> Iterator[str]:
    modes = {"FAIRNESS": Fairness, "ORDERING": Ordering, "OVERLOAD": Overload}
    modes |= {"BAND_POLICY": BandPolicy, "WAIT_SIGNAL": WaitSignal}
    words = {kind: get_args(values) for kind, values in modes.items()}
    words |= {"NOTIFY": NOTIFICATIONS, "STATE": STATES}
    for kind, values in words.items():
        for value in values:
            yield f"local {kind}_{value.upper().replace('-', '_')} = '{value}'"
    # Define one table instead of a local for each name: a Lua chunk may have at most 200 locals.
    refusals = [f"{each.value.upper().replace('-', '_')} = '{each.value}'" for each in Refusal]
    yield f"local REFUSED = {_list(refusals)}"
    yield f"local ITEM = {_list([f'{name} = {len(fields)}' for name, fields in ITEMS.items()])}"
    for name, row in (("FLOW_QUEUE", FLOW_QUEUE_ROW), ("REQUEST", REQUEST_ROW), ("WORKLOAD", WORKLOAD_ROW)):
        yield f"local {name}_ROW =\n{_text(_BYTE_31.join(row.values()))}"
    yield f"local UNPICKABLE, VIEW_LIMIT = {UNPICKABLE}, {VIEW_LIMIT}"
    yield f"local LEAST_WEIGHT, MOST_WEIGHT, MOST_COST = {LEAST_WEIGHT:g}, {MOST_WEIGHT:g}, {MOST_COST:g}"
    yield f"local MOST_BYTES, FORMAT = {MOST_BYTES}, '{FORMAT}'"
    yield f"local COUNTERS = {_list([_quoted(name) for name in COUNTERS])}"


def _functions() -> Iterator[str]:
    arrival = [f"r.{name}" for name in (*ARRIVAL_TEXTS, *ARRIVAL_NUMBERS)]
    packed = "<" + "s" * len(ARRIVAL_TEXTS) + "d" * len(ARRIVAL_NUMBERS)
    yield f"local function unpack_arrival(r, text)\n{_commas(arrival)} ="
    yield f"    struct.unpack('{packed}', text)\nend"
    record = [f"r.{name}" for name in RECORD]
    layouts = [WAITING_LAYOUT] * WAITING_STATES + [RUNNING_LAYOUT] * 2 + [CHARGED_LAYOUT] * len(STATES)
    bytes, bytes_layout = ", ".join(f"r.{name}" for name in RECORD_BYTES), "".join(RECORD_BYTES.values())
    charge = [f"r.{name}" for name in RECORD_CHARGE]
    yield "local unpack_record, pack_record\ndo -- a chunk may have 200 locals"
    yield f"local STATE_NAMES = {_list([_quoted(state) for state in (*STATES, *STATES)])}"
    yield f"local STATE_NUMBERS = {_list([f'{state} = {n}' for n, state in enumerate(STATES, 1)])}"
    yield f"local RECORD_LAYOUTS = {_list([_quoted(layout) for layout in layouts])}"
    yield f"""function unpack_record(r, text)
  local number = string.byte(text)
  local layout, rest, any_endpoint, _ = RECORD_LAYOUTS[number]
  r.state = STATE_NAMES[number]
  if number > {len(STATES)} then
{_commas(["_", *record, bytes, "any_endpoint", "r.prefillers", *charge])} =
    struct.unpack(layout, text)
    r.any_endpoint = any_endpoint == 1
    return
  end
{_commas(["number", *record, "rest"])} =
    struct.unpack(layout, text)
  if number <= {WAITING_STATES} then rest, r.endpoints, r.taken, r.tag = r.endpoints, '', 0, -1 end
  r.prefillers = ''
  if rest > #text then
    r.bytes, r.any_endpoint = 0, false
  elseif number == {len(STATES)} then
    r.bytes, r.any_endpoint, r.prefillers = 0, false, struct.unpack('s', text, rest)
  else
    {bytes}, rest = struct.unpack('{bytes_layout}', text, rest)
    r.any_endpoint = string.byte(text, rest) == 1
  end
end
function pack_record(r)
  local number = STATE_NUMBERS[r.state]
  local is_placed, any_endpoint = number == {len(STATES)}, number <= {WAITING_STATES} and r.any_endpoint
  if r.tenancy > 0 then
    number = number + {len(STATES)}
    return struct.pack(RECORD_LAYOUTS[number], number,
{_commas(record)},
    is_placed and 0 or r.bytes, r.bytes_epoch or 0, any_endpoint and 1 or 0, is_placed and r.prefillers or '',
{_commas(charge)})
  end
  local text = struct.pack(RECORD_LAYOUTS[number], number,
{_commas(record)})
  if is_placed then return r.prefillers == '' and text or text .. struct.pack('s', r.prefillers) end
  if r.bytes == 0 and not any_endpoint then return text end
  text = text .. struct.pack('{bytes_layout}', r.bytes, r.bytes_epoch or 0)
  return any_endpoint and text .. '\\1' or text
end
end"""
    fields = _commas([*ACCOUNTING_TOKEN, "rest"])
    pattern = "^" + r"([^\t]*)\t" * (len(ACCOUNTING_TOKEN) - 1) + r"([^\t]*)(.*)"
    yield f"""local function parse_accounting_token(token)
  local
{fields} =
    string.match(token,
{_text(pattern)})
  if not flow then return nil end
  return {{
{_commas([f"{name} = {name}" for name in ACCOUNTING_TOKEN])},
    alone_ms = tonumber(string.match(rest, '^\\t{ADMITTED_ALONE}(%d+)%f[\\t%z]')),
    priority = tonumber(string.match(rest, '\\t{OTHER_PRIORITY}(-?%d+)%f[\\t%z]'))
  }}
end"""


def _quoted(text: str) -> str:
    return f"'{text}'"


def _text(text: str) -> str:
    parts = re.findall(r"(?:\\\w+|[^\\]){1,90}", text)
    return "    " + " ..\n    ".join(_quoted(part) for part in parts)


def _list(values: Sequence[str]) -> str:
    return "{\n" + _commas(values) + "\n}"


def _commas(values: Sequence[str]) -> str:
    lines = textwrap.wrap(", ".join(values), 110, break_long_words=False, break_on_hyphens=False)
    return textwrap.indent("\n".join(lines), "  ")
