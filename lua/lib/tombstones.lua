-- include: registry
-- Keeps the ids of requests that ended, and of reclaimed requests, which may still run. Uses records
-- from lib/registry.lua, the clock from lib/pool.lua. Defines `tombstones`, and `drop_old` for the sweep.

-- Drop at most `most` ids from the sorted set `set` (id -> time, ms): ids older than `life_ms`, and ids beyond the
-- latest LIMIT. Also drop the ids' fields in `hash`, if given. Return whether there may be more to drop.
local drop_old
do
  local LIMIT = 100000
  function drop_old(set, life_ms, most, hash)
    local count = read('ZCARD', set)
    if count == 0 then return false end
    local over = read('ZCOUNT', set, '-inf', now_ms - life_ms)
    local leaving = math.min(math.max(over, count - LIMIT), most)
    if leaving > 0 then
      for _, id in ipairs(read('ZRANGE', set, 0, leaving - 1)) do
        defer_write('ZREM', set, id)
        if hash then defer_write('HDEL', hash, id) end
      end
    end
    return leaving == most
  end
end

-- Tombstones: requests whose end was reported while some replica was without Redis. A replica that missed the end still
-- has the request in its journal, and must not restore it (renew). The set `unheard` has requests in flight that were
-- reclaimed without a report of their end; a request that still runs is restored by its next renewal. Scores: time, ms.
local tombstones = {}
do
  local LATE_MS = 2000 -- largest error of the time that a replica reports for an admission or renewal
  local GIVEN_UP_MS = 3600000 -- for how long after its reclaim a request may be restored
  local MOST_GHOSTS = 100
  function tombstones.put(id, ended_ms)
    defer_write('ZADD', key.tombstones, ended_ms, id)
    defer_write('ZREM', key.unheard, id)
  end

  function tombstones.give_up(id) defer_write('ZADD', key.unheard, now_ms, id) end
  function tombstones.was_given_up(id) return read('ZSCORE', key.unheard, id) end

  function tombstones.has_come_back(id)
    defer_write('ZREM', key.unheard, id)
    tombstones.forget_ghost(id)
  end

  -- Return whether a tombstone forbids restoring the request. `seen_ms`: when the caller, which admitted the request,
  -- last saw the request alive; if later than the end, a new request has the same id. `seen_ms` is nil if an access
  -- log, perhaps with an old accounting token, reports the request.
  function tombstones.covers(id, seen_ms)
    local ended_ms = tonumber(read('ZSCORE', key.tombstones, id) or nil)
    return ended_ms and not (seen_ms and ended_ms <= seen_ms - LATE_MS)
  end

  -- Keep the record of a request that the sweep reclaims because metrics pages count too few requests (a `ghost`). A
  -- page shows how many requests have ended, but not which: the reclaimed request may run, and another request of the
  -- endpoint may have ended while its replica was suspended and could not report the end. When the report of that end
  -- comes, the script `settle` restores the reclaimed request. `page_ms`: the time of the metrics page.
  function tombstones.put_ghost(r, page_ms)
    if read('HLEN', key.ghosts) < MOST_GHOSTS then
      defer_write('HSET', key.ghosts, r.id, struct.pack('d', page_ms) .. pack_record(r))
    end
  end

  function tombstones.has_ghosts() return read('HLEN', key.ghosts) > 0 end
  function tombstones.forget_ghost(id) defer_write('HDEL', key.ghosts, id) end

  local function parse_ghost(id, text)
    local page_ms, at = struct.unpack('d', text)
    local r = record.new(id)
    unpack_record(r, string.sub(text, at))
    return page_ms, r
  end

  -- Return the record of a reclaimed request (a ghost) for which `is_mistaken(page_ms, record)` holds, and page_ms; or
  -- nil. Also drop old and damaged records of `ghosts`.
  function tombstones.find_ghost(is_mistaken)
    local found = read('HGETALL', key.ghosts)
    for i = 1, #found, 2 do
      local known, page_ms, r = pcall(parse_ghost, found[i], found[i + 1])
      if not known or page_ms < now_ms - settings.lease_ms or record.read(r.id) then
        tombstones.forget_ghost(found[i])
      elseif is_mistaken(page_ms, r) then
        tombstones.forget_ghost(r.id)
        return r, page_ms
      end
    end
  end

  -- For the sweep: drop at most `most` old ids each of `tombstones` and `unheard`, and old records of `ghosts`. Return
  -- whether more ids or records may be left to drop.
  function tombstones.expire(most)
    tombstones.find_ghost(function() return false end)
    local more = drop_old(key.tombstones, settings.lease_ms + LONGER_MS, most)
    return drop_old(key.unheard, GIVEN_UP_MS, most) or more
  end
end
