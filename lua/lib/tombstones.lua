-- include: pool
-- Requests whose end somebody has heard, by when, ms: what a replica kept in its journal while it was without the
-- shared state, and has not heard the end of, is not brought back (renew). And requests in flight that were given up
-- unheard, by when, ms: those may run, and a sign of life brings them back.
local tombstones = {}
do
  local LATE_MS = 2000 -- by which a replica may be mistaken about when it let a request go, or saw it alive
  local GIVEN_UP_MS = 3600000 -- for so long one that was given up may come back
  local MOST = 100000 -- of each kind; the oldest beyond that go
  function tombstones.put(id, ended_ms)
    later('ZADD', key.buried, ended_ms, id)
    later('ZREM', key.unheard, id)
  end
  function tombstones.give_up(id) later('ZADD', key.unheard, now_ms, id) end
  function tombstones.gave_up(id)
    send(key.unheard)
    return redis.call('ZSCORE', key.unheard, id)
  end
  function tombstones.has_come_back(id) later('ZREM', key.unheard, id) end
  -- Whether a request has ended. One that the caller let go itself, and last saw alive at `seen_ms` (else nil), may be
  -- another of the same id, let go later. What others only heard of may be an old ticket that is told again.
  function tombstones.covers(id, seen_ms)
    local ended_ms = tonumber(redis.call('ZSCORE', key.buried, id) or nil)
    return ended_ms and not (seen_ms and ended_ms <= seen_ms - LATE_MS)
  end
  -- The sweep's part: at most `most` a call of each kind. Returns whether there may be more.
  local function forget(places, life_ms, most)
    local count = redis.call('ZCARD', places)
    if count == 0 then return false end
    local over = redis.call('ZCOUNT', places, '-inf', now_ms - life_ms)
    local leaving = math.min(math.max(over, count - MOST), most)
    if leaving > 0 then
      for _, id in ipairs(redis.call('ZRANGE', places, 0, leaving - 1)) do later('ZREM', places, id) end
    end
    return leaving == most
  end
  function tombstones.forget(most)
    send(key.unheard)
    local more = forget(key.buried, settings.lease_ms + LONGER_MS, most)
    return forget(key.unheard, GIVEN_UP_MS, most) or more
  end
end
