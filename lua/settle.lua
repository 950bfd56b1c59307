-- include: dispatch
-- Account for requests that have ended, whoever reports it: give back stock, endpoint and lease, and
-- dispatch what now fits. A queued one has lost its client and leaves the queue.
--
-- Guarantees: each request is given back once; an unknown or repeated id changes nothing (G6).
--
-- KEYS[1] epp:{POOL}:pool
-- ARGV[1] the calling replica; then for each request: id, outcome (completed, client_gone, upstream_failed)
-- Returns {born, news, attempts, served, reply...}: 'settled MODEL' | 'left MODEL' (was queued) | 'unknown'
local ITEM = 2
news.caller = ARGV[1]
local replies = {}
for at = 2, #ARGV, ITEM do
  local id, outcome = unpack(ARGV, at, at + ITEM - 1)
  local r, reply = record.read(id), 'unknown'
  if r then
    local waiting = r.state == 'queued' or r.state == 'held'
    finish_request(r, waiting and 'cancelled' or outcome)
    reply = (waiting and 'left ' or 'settled ') .. r.model
  end
  replies[#replies + 1] = reply
end
local born, mine, attempts, served = conclude()
return {born, mine, attempts, served, unpack(replies)}
