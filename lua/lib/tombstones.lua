-- include: pool
-- Requests whose end somebody has heard, by when, ms: what a replica kept in its journal while it was without the
-- shared state, and has not heard the end of, is not brought back (renew).
local tombstones = {}
do
  local LATE_MS = 2000 -- by which a replica may be mistaken about when it let a request go, or saw it alive
  local LONGER_MS = 10000 -- than a lease: no journal brings back what is silent for as long (app/admission/outbox.py)
  local MOST = 100000 -- the oldest beyond that go
  function tombstones.put(id, ended_ms) later('ZADD', key.buried, ended_ms, id) end
  -- Whether a request has ended. One that the caller let go itself, and last saw alive at `seen_ms` (else nil), may be
  -- another of the same id, let go later. What others only heard of may be an old ticket that is told again.
  function tombstones.covers(id, seen_ms)
    local ended_ms = tonumber(redis.call('ZSCORE', key.buried, id) or nil)
    return ended_ms and not (seen_ms and ended_ms <= seen_ms - LATE_MS)
  end
  -- The sweep's part: at most `most` a call. Returns whether there may be more.
  function tombstones.forget(most)
    local count = redis.call('ZCARD', key.buried)
    if count == 0 then return false end
    local last_ms = now_ms - settings.lease_ms - LONGER_MS
    local over = redis.call('ZCOUNT', key.buried, '-inf', last_ms)
    local leaving = math.min(math.max(over, count - MOST), most)
    if leaving > 0 then
      for _, id in ipairs(redis.call('ZRANGE', key.buried, 0, leaving - 1)) do later('ZREM', key.buried, id) end
    end
    return leaving == most
  end
end
