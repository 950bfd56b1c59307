"""Makes Envoy set a request's flow by its API key: a table has the flow's name for each key's SHA-256.

    picker envoy-config --config picker.yaml | python deploy/examples/api_key.py keys.yaml > envoy.yaml

keys.yaml has a line for each key, with the key's hash (`printf %s "$KEY" | sha256sum`) instead of the key:

    "4fb2…": team-a
    "91c0…": team-a/nightly            # a path, if the configuration has `tenants`

A request has its key in `authorization: Bearer KEY`, or in `x-api-key: KEY` as Anthropic's clients send it.
Envoy answers 401 if the table lacks the key; otherwise Envoy removes the key before picker and model server.
Keys must be long and random, as `openssl rand -hex 24` makes them: whoever guesses a key gets its flow.
"""

import json
import re
import sys
from pathlib import Path

import yaml
from edge import FAIRNESS_ID, first_filter, read, text, write

_REFUSAL = json.dumps(
    {"error": {"message": "no valid API key", "type": "invalid_request_error", "code": "invalid_api_key"}}
)
_LUA = """
local bit = require("bit")
local band, bnot, bor, bxor = bit.band, bit.bnot, bit.bor, bit.bxor
local lshift, rshift, ror, tobit = bit.lshift, bit.rshift, bit.ror, bit.tobit
local FLOWS = {%(flows)s}
local BEGIN = {%(begin)s}
local ROUND = {%(round)s}

local function sha256(text)
  local size = #text * 8
  text = text .. "\\128" .. string.rep("\\0", (55 - #text) %% 64 + 4)
    .. string.char(rshift(size, 24), band(rshift(size, 16), 255), band(rshift(size, 8), 255), band(size, 255))
  local sum = {unpack(BEGIN)}
  for at = 1, #text, 64 do
    local w = {}
    for i = 1, 16 do
      local p, q, r, s = text:byte(at + 4 * i - 4, at + 4 * i - 1)
      w[i] = bor(lshift(p, 24), lshift(q, 16), lshift(r, 8), s)
    end
    for i = 17, 64 do
      local x, y = w[i - 15], w[i - 2]
      w[i] = tobit(w[i - 16] + bxor(ror(x, 7), ror(x, 18), rshift(x, 3))
        + w[i - 7] + bxor(ror(y, 17), ror(y, 19), rshift(y, 10)))
    end
    local a, b, c, d, e, f, g, h = unpack(sum)
    for i = 1, 64 do
      local one = h + bxor(ror(e, 6), ror(e, 11), ror(e, 25)) + bxor(band(e, f), band(bnot(e), g))
        + ROUND[i] + w[i]
      local two = bxor(ror(a, 2), ror(a, 13), ror(a, 22)) + bxor(band(a, b), band(a, c), band(b, c))
      h, g, f, e, d, c, b, a = g, f, e, tobit(d + one), c, b, a, tobit(one + two)
    end
    for i, part in ipairs({a, b, c, d, e, f, g, h}) do sum[i] = tobit(sum[i] + part) end
  end
  for i = 1, 8 do sum[i] = bit.tohex(sum[i]) end
  return table.concat(sum)
end

function envoy_on_request(handle)
  local headers = handle:headers()
  local key = (headers:get("authorization") or ""):match("^[Bb]earer (%%S+)$") or headers:get("x-api-key")
  headers:remove("authorization")
  headers:remove("x-api-key")
  local flow = key and #key <= 512 and FLOWS[sha256(key)]
  if not flow then
    local said = {[":status"] = "401", ["content-type"] = "application/json", ["www-authenticate"] = "Bearer"}
    handle:respond(said, %(refusal)s)
    return
  end
  headers:replace("%(header)s", flow)
end
"""


def lua(flows: dict[str, str]) -> str:
    """The filter's code for a table from a key's SHA-256 (hexadecimal) to its flow."""
    primes = [n for n in range(2, 312) if all(n % d for d in range(2, n))]
    return _LUA % {
        "flows": ", ".join(f'["{digest}"] = {_quoted(flow)}' for digest, flow in flows.items()),
        # SHA-256's constants: the first 32 bits of the fractional parts of roots of primes.
        "begin": ", ".join(str(int(prime ** (1 / 2) % 1 * 2**32)) for prime in primes[:8]),
        "round": ", ".join(str(int(prime ** (1 / 3) % 1 * 2**32)) for prime in primes),
        "refusal": _quoted(_REFUSAL),
        "header": FAIRNESS_ID,
    }


def _quoted(text: str) -> str:
    return '"' + "".join(f"\\{byte:03d}" for byte in text.encode()) + '"'


def table(file: Path) -> dict[str, str]:
    """The table in `file`. Ends the program with an error message if the table is invalid."""
    try:
        flows = yaml.safe_load(text(file))
    except yaml.YAMLError as fault:
        sys.exit(f"{file}: is not YAML: {fault}")
    if not isinstance(flows, dict) or not flows:
        sys.exit(f"{file}: must have a table from SHA-256 to flow")
    for digest, flow in flows.items():
        if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
            sys.exit(f"{file}: {digest!r} is not a SHA-256 of 64 hexadecimal digits in quotes")
        if not isinstance(flow, str) or not flow.isprintable() or not 1 <= len(flow.encode()) <= 256:
            sys.exit(f"{file}: {flow!r} is not a printable flow name of 1 to 256 bytes")
    return flows


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    code = lua(table(Path(sys.argv[1])))
    tree = read()
    first_filter(
        tree,
        "envoy.filters.http.lua",
        {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
            "defaultSourceCode": {"inlineString": code},
        },
    )
    write(tree)


if __name__ == "__main__":
    main()
