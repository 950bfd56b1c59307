-- include: pool
-- Requests whose end somebody has heard, by when, ms: what a replica kept in its journal while it was without the
-- shared state, and has not heard the end of, is not brought back (renew).
local tombstones = {}
do
  local LATE_MS = 2000 -- by which a sign of life may come later than the end, which another stream has told
  local LONGER_MS = 10000 -- than a lease: no journal brings back what is silent for as long (app/admission/outbox.py)
  local MOST = 100000 -- the oldest beyond that go
  function tombstones.put(id, ended_ms) later('ZADD', key.buried, ended_ms, id) end
  -- Whether the request that was last seen alive at `seen_ms` has ended since. A later sign of life is that of
  -- another request of the same id.
  function tombstones.covers(id, seen_ms)
    local ended_ms = redis.call('ZSCORE', key.buried, id)
    return ended_ms and tonumber(ended_ms) > seen_ms - LATE_MS
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
