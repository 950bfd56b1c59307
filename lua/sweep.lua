-- include: outliers upkeep
-- Periodic maintenance: expired requests, leases of requests and prefills that ran out, silent replicas, placed
-- requests that ended without a report (ghosts), idle workloads, and waiting requests whose order has changed with time
-- or with a new policy. Any replica may call the sweep at any time.
--
-- Guarantees: the sweep runs once per interval, whichever replica calls; a call does a bounded amount of work. A call
-- that leaves work returns 1 as `more`, and may be repeated at once.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica
-- args[2] interval_ms   args[3] grace_ms: how long a silent replica's queued requests wait for adoption
-- args[4] idle_ms: a workload that is idle for this long is forgotten
-- args[5] unseen_ms: a placed request without a renewal for this long may have ended without a report
--
-- Returns {epoch, notifications, attempts, served, ran (0 or 1), expired, reclaimed, more (0 or 1), requests reclaimed
--   by metrics pages, endpoints whose pages may show that further requests have ended without a report}

-- These constants limit the work of one sweep call.
local CHUNK = 32 -- most requests that a call ends, orphans or reads
local REFILED = 16 -- most requests that a call moves to a new order; each costs a removal and an insertion
local LIGHT = 500 -- most old entries of each kind that a call drops
local WALKS = 150 -- most calls per interval that continue the scan of waiting requests
local DOWN_MS = 10000 -- a `down` mark that no replica has confirmed for this long is removed
-- The longest times, in ms, from a request's placement until its endpoint's metrics page counts the request. For a
-- request whose client is reported gone the time is shorter, since Envoy no longer sends that request.
local TRANSIT_MS, REPORTED_TRANSIT_MS = 1000, 100
local MOST_RECENT = 1000 -- if more requests are recent, do not count them; ended requests wait for their lease's end
local ORIGIN_MS = 86400000 -- how long an id of the Responses API is remembered after it was last noted
local PRESSED = 0.9 -- once the queue is less than this fraction full, the sweep resets preemption times

-- Reclaim a request without a report of its end. If the request still runs, its next renewal restores the request.
local function reclaim(r, note)
  if r.state == STATE_PLACED then tombstones.give_up(r.id) end
  finish_request(r, 'reclaimed', note)
end

-- Reclaim at most `limit` requests whose lease has ended. Return their number.
local function reclaim_expired_leases(limit)
  local reaped = 0
  for _ = 1, STRAYS do
    local ids = read('ZRANGEBYSCORE', key.inflight, '-inf', now_ms, 'LIMIT', 0, limit)
    record.prefetch(ids, #ids)
    for _, id in ipairs(ids) do
      local r = record.read(id)
      if r and not record.is_waiting(r) then
        reclaim(r)
        reaped = reaped + 1
      else
        drop_stray('ZREM', key.inflight, id)
      end
    end
    if reaped > 0 or #ids < limit then break end
  end
  return reaped
end

-- End at most `limit` prefill reservations whose leases have ended: no replica has reported the first token.
local function end_lapsed_prefills(limit)
  for _, member in ipairs(read('ZRANGEBYSCORE', key.prefills, '-inf', now_ms, 'LIMIT', 0, limit)) do
    local endpoint, id = string.match(member, '^(.-)\31(.*)$')
    local r = record.read(id or '')
    if r and r.state == STATE_PLACED and prefill.first(r.prefillers) == endpoint then
      stages.end_prefill(r, 'lease')
    else
      if endpoint then stages.release_prefill(endpoint, id) end
      drop_stray('ZREM', key.prefills, member)
    end
  end
end

-- Parse an endpoint's entry in the hash `metrics`. Return the higher request count of the endpoint's last two metrics
-- pages, the time of the older page and the time of the newer page (ms); nil if the entry lacks one of these values.
local function reported_load(text)
  local known, page = pcall(cjson.decode, text)
  if not known or type(page) ~= 'table' then return nil end
  local at, before = tonumber(page.at), tonumber(page.before) -- by Redis's TIME; converted to the pool's time below
  local queued, running = tonumber(page.waiting), tonumber(page.running)
  if not (at and before and queued and running) then return nil end
  at, before = at + clock_shift_ms, before + clock_shift_ms
  if at > now_ms + 1000 or before > at then return nil end -- Redis's TIME was set back after the scrape
  return math.max(queued + running, tonumber(page.before_load) or math.huge), before, at
end

-- Return endpoint -> number of the endpoint's requests that were placed or renewed after `since_ms`; nil if these are
-- more than MOST_RECENT.
local function count_recent(since_ms)
  local recent, first = {}, since_ms + settings.lease_ms
  if read('ZCOUNT', key.inflight, '(' .. first, '+inf') > MOST_RECENT then return nil end
  local ids = read('ZRANGEBYSCORE', key.inflight, '(' .. first, '+inf')
  record.prefetch(ids, #ids)
  for _, id in ipairs(ids) do
    local r = record.read(id)
    if r and r.state == STATE_PLACED then
      local address = endpoints.first(r.endpoints)
      recent[address] = (recent[address] or 0) + 1
    end
  end
  return recent
end

-- Requests in flight that may have ended without a report, as {id, seen_ms, is_reported}: first suspects without a
-- renewal since the suspicion, then requests without a renewal for `unseen_ms`, the longest silent first. Suspects are
-- requests whose client has gone according to the access log (report_client_gone.lua), and requests whose replica fell
-- silent before it read the placement.
local function silent_requests(unseen_ms, limit)
  local found, is_found = {}, {}
  local suspects = read('ZRANGE', key.suspects, 0, limit - 1, 'WITHSCORES')
  for i = 1, #suspects, 2 do
    local id = suspects[i]
    local seen_ms = tonumber(read('ZSCORE', key.inflight, id) or 0) - settings.lease_ms
    if seen_ms > 0 and seen_ms <= tonumber(suspects[i + 1]) then
      table.insert(found, {id = id, seen_ms = seen_ms, is_reported = true})
      is_found[id] = true
    else
      defer_write('ZREM', key.suspects, id) -- ended, or renewed since
    end
  end
  local latest = now_ms + settings.lease_ms - unseen_ms
  if latest > now_ms then
    local leases = read('ZRANGEBYSCORE', key.inflight, '(' .. now_ms, latest, 'WITHSCORES', 'LIMIT', 0, limit)
    for i = 1, #leases, 2 do
      if not is_found[leases[i]] then
        local seen_ms = tonumber(leases[i + 1]) - settings.lease_ms
        table.insert(found, {id = leases[i], seen_ms = seen_ms, is_reported = false})
      end
    end
  end
  return found
end

-- Reclaim placed requests that have ended without a report (ghosts). If an endpoint's last two metrics pages are newer
-- than a request's last renewal, both pages count the request if it still runs. If the pool counts more requests on the
-- endpoint than both pages, reclaim the excess among such silent requests, the longest silent first. For a request
-- whose client is reported gone, only the last page must be newer, by REPORTED_TRANSIT_MS. Return the number of
-- reclaimed requests, and the endpoints whose pages may show more such requests.
local function reclaim_ghosts(unseen_ms, limit)
  local found = silent_requests(unseen_ms, limit)
  if #found == 0 then return 0, {} end
  local ids, silent, suspects = {}, {}, {}
  for i, one in ipairs(found) do ids[i] = one.id end
  record.prefetch(ids, #ids)
  for _, one in ipairs(found) do
    one.r = record.read(one.id)
    if not one.r or record.is_waiting(one.r) then
      drop_stray('ZREM', key.inflight, one.id)
      defer_write('ZREM', key.suspects, one.id)
    elseif one.r.state == STATE_PLACED then
      local address = endpoints.first(one.r.endpoints)
      if not silent[address] then
        silent[address] = {}
        suspects[#suspects + 1] = address
      end
      table.insert(silent[address], one)
    end
  end
  local ghosts = 0
  local texts = #suspects > 0 and read('HMGET', key.metrics, unpack(suspects)) or {}
  for i, address in ipairs(suspects) do
    local reported, older_ms, newer_ms
    if texts[i] then reported, older_ms, newer_ms = reported_load(texts[i]) end
    if reported and endpoints.in_flight(address) > reported then
      local missing, is_reported = 0, nil
      for _, one in ipairs(silent[address]) do
        if one.is_reported ~= is_reported then
          is_reported = one.is_reported
          local recent = count_recent(is_reported and newer_ms - REPORTED_TRANSIT_MS or older_ms - TRANSIT_MS)
          missing = recent and endpoints.in_flight(address) - (recent[address] or 0) - reported or 0
        end
        local by_ms = is_reported and newer_ms - REPORTED_TRANSIT_MS or older_ms
        if missing >= 1 and one.seen_ms < by_ms then
          if not is_reported then tombstones.put_ghost(one.r, older_ms) end
          reclaim(one.r, 'ghost')
          missing, ghosts = missing - 1, ghosts + 1
        end
      end
    end
  end
  return ghosts, suspects
end

-- Orphan the queued requests of one silent replica, so that another replica can adopt them. A call scans at most
-- `limit` requests; `key.orphan_cursors` keeps the cursor. Requests that the scan misses are orphaned by dispatch
-- at their turn, or expire. The last scan also removes the replica. Returns whether requests are left to scan.
local function orphan_silent_replica(grace_ms, limit)
  local silent = read('ZRANGEBYSCORE', key.replicas, '-inf', now_ms - settings.silence_ms, 'LIMIT', 0, 1)[1]
  if not silent then return false end
  local scan = read('HSCAN', key.requests, read('HGET', key.orphan_cursors, silent) or '0', 'COUNT', limit)
  for i = 1, #scan[2], 2 do
    local r = record.from_scan(scan[2][i], scan[2][i + 1])
    if r and r.owner == silent and r.state == STATE_QUEUED then queue.orphan(r, now_ms + grace_ms) end
  end
  if scan[1] ~= '0' then
    defer_write('HSET', key.orphan_cursors, silent, scan[1])
    return true
  end
  defer_write('ZREM', key.replicas, silent)
  defer_write('HDEL', key.replica_info, silent)
  defer_write('HDEL', key.orphan_cursors, silent)
  local inbox = read('HGETALL', key.inbox[silent])
  for i = 1, #inbox, 2 do -- Envoy has no placement that the replica has not acknowledged
    if string.find(inbox[i + 1], '^' .. NOTIFY_PLACED) then defer_write('ZADD', key.suspects, now_ms, inbox[i]) end
  end
  defer_unlink(key.inbox[silent]) -- also drops notifications of this call
  return false
end

-- Scan a chunk of `hash` from `cursor` (false: the start) and drop the entries that are idle according to `kind`.
-- Return the cursor for the next call.
local function forget_idle(hash, cursor, kind, idle_ms)
  local scan = read('HSCAN', hash, cursor or '0', 'COUNT', 2 * CHUNK)
  for i = 1, #scan[2], 2 do
    if kind.idle(scan[2][i + 1], idle_ms) then kind.drop(scan[2][i]) end
  end
  return scan[1]
end

-- Scan waiting requests: move each request to its position in a new order, or index its new score. Return the cursor;
-- '0' at the end.
local function refresh_waiting(cursor, limit)
  if pool.refiling == 1 then limit = math.min(limit, REFILED) end
  local scan = read('HSCAN', key.requests, cursor, 'COUNT', limit)
  for i = 1, #scan[2], 2 do
    local r = record.from_scan(scan[2][i], scan[2][i + 1])
    if r and r.state == STATE_QUEUED then
      if pool.refiling == 1 then
        queue.reorder(r)
      elseif not order.refresh(r, queue.flow_queue(r)) then
        pool.note_lost('line')
      end
    end
  end
  if scan[1] == '0' then pool.refiling = 0 end
  return scan[1]
end

-- Set the epoch to 0, because the Redis key named `lost` was lost. While the epoch is 0, as before the first publish,
-- no request is admitted; the next publish rebuilds the pool and begins a new epoch.
local function await_rebuild(lost)
  defer_write('HSET', key.pool, 'lost', lost)
  pool.epoch = 0
  pool.commit()
  flush(key.pool)
end

-- Measure pool.rate, dispatches per second since the last sweep, for Retry-After. While requests wait, a known rate
-- does not fall to 0, which would mean an unknown rate.
local function measure_rate(swept_ms, dispatches)
  if swept_ms == 0 or now_ms <= swept_ms then return end -- the first sweep, or the clock was set back
  local measured = math.max(0, pool.dispatches - dispatches) * 1000 / (now_ms - swept_ms)
  local rate = pool.rate == 0 and measured or pool.smoothed(pool.rate, measured, 0.5)
  if rate == 0 and pool.rate > 0 and pool.queued > 0 then rate = SMALLEST end
  pool.rate = rate
end

-- In the sorted set, lower each time beyond now + `life_ms` to now + `life_ms`: after a Redis failover such times may
-- come from the former primary, whose clock was ahead.
local AHEAD_MS = 1000
local function clamp_future(moments, life_ms)
  local latest = now_ms + life_ms
  local future = read('ZRANGEBYSCORE', moments, '(' .. latest + AHEAD_MS, '+inf', 'LIMIT', 0, LIGHT)
  for _, member in ipairs(future) do defer_write('ZADD', moments, latest, member) end
end

local function sweep(args)
  local owner, interval_ms, grace_ms, idle_ms = args[1], tonumber(args[2]), tonumber(args[3]), tonumber(args[4])
  local unseen_ms = tonumber(args[5])
  reset_notifications(owner)
  local swept_ms, was_more, workload_cursor, flow_workload_cursor, answer_cursor, walked, walks, swept_dispatches,
    bounds_cursor, throttled_page, throttled_walk = unpack(read('HMGET', key.pool, 'swept_ms', 'sweep_more',
      'workload_cursor', 'flow_workload_cursor', 'answer_cursor', 'walk', 'walks', 'swept_dispatches', 'bounds_cursor',
      'throttled_page', 'throttled_walk'))
  swept_ms = tonumber(swept_ms or 0)
  local fresh = now_ms - swept_ms >= interval_ms or swept_ms > now_ms
  if not pool.known or not (fresh or was_more == '1') then
    return {exact(pool.epoch), {}, 0, 0, 0, 0, 0, 0, 0, {}}
  end
  local lost = fresh and upkeep.find_lost_key()
  if lost then
    await_rebuild(lost)
    return {'0', {}, 0, 0, 1, 0, 0, 0, 0, {}}
  end
  local more = false
  local ran, expired = run_timers(CHUNK)
  local reaped = ran < CHUNK and reclaim_expired_leases(CHUNK - ran) or 0
  local ghosts, suspects = 0, {}
  end_lapsed_prefills(CHUNK)
  if ran + reaped < CHUNK then ghosts, suspects = reclaim_ghosts(unseen_ms, CHUNK - ran - reaped) end
  local left = CHUNK - ran - reaped - ghosts
  if left == 0 or orphan_silent_replica(grace_ms, left) then more = true end
  walks, walked = fresh and 0 or tonumber(walks or 0), walked or '0'
  if pool.refiling == 1 or (settings.ordering == ORDERING_WORKLOAD_AWARE and (fresh or walked ~= '0')) then
    if left > 0 then walked, walks = refresh_waiting(walked, left), walks + 1 end
    if walked ~= '0' and (pool.refiling == 1 or walks < WALKS) then more = true end
  end
  local next_page = queue.unthrottle_page(tonumber(throttled_page or 0))
  if next_page and throttled_walk == '1' then more = true else throttled_walk = '0' end
  for _, band in ipairs(BANDS) do
    upkeep.drop_stray_flow_queues(band, CHUNK)
    if fresh and settings.tenants then tenants.drop_idle_nodes(band, CHUNK, idle_ms) end
    if upkeep.drop_finish_tags(band, LIGHT) then more = true end
  end
  if fresh then
    for _, band in ipairs(BANDS) do
      upkeep.rebase_tags(band)
      if pool[QUEUED[band]] == 0 then bands.forget_bytes(band) end
    end
    upkeep.rebase_band_tags()
    for _, band in ipairs(bands.idle()) do
      log_flow_queue('collected', band, '')
      bands.collect(band)
      tenants.drop_tree(band)
    end
  end
  upkeep.drop_stray_overdue(CHUNK)
  if tombstones.expire(LIGHT) then more = true end
  if read('HLEN', key.origins) ~= read('ZCARD', key.origin_times) then -- one of the two keys was lost
    defer_unlink(key.origins)
    defer_unlink(key.origin_times)
  elseif drop_old(key.origin_times, ORIGIN_MS, LIGHT, key.origins) then
    more = true
  end
  if pool.pressed == 1 and pool.queued < PRESSED * settings.total_capacity then
    if upkeep.forget_preemptions(LIGHT) then more = true else pool.pressed = 0 end
  end
  if fresh then
    clamp_future(key.replicas, 0)
    clamp_future(key.inflight, settings.lease_ms)
    clamp_future(key.prefills, settings.lease_ms)
    marks.expire(DOWN_MS)
    outliers.sweep()
    upkeep.add_preemption_candidates(LIGHT)
    measure_rate(swept_ms, tonumber(swept_dispatches or 0))
    defer_write('HSET', key.pool, 'swept_ms', now_ms)
    defer_write('HSET', key.pool, 'swept_dispatches', pool.dispatches)
  end
  if fresh and settings.tenants then quotas.drop_idle_balances(3 * CHUNK) end
  local counts = settings.tenants and (bounds_cursor or '0') ~= '0'
  if counts and (fresh or quotas.count_running(bounds_cursor)) then more = true end
  local positions = {sweep_more = (more or #suspects > 0) and 1 or 0, walk = walked, walks = walks,
    throttled_page = next_page or queue.LAST_PAGE, throttled_walk = throttled_walk,
    workload_cursor = forget_idle(key.workloads, workload_cursor, workloads.by_id, idle_ms),
    flow_workload_cursor = forget_idle(key.flow_workloads, flow_workload_cursor, workloads.by_flow, idle_ms),
    answer_cursor = forget_idle(key.answers, answer_cursor, usage, idle_ms)}
  for field, value in pairs(positions) do defer_write('HSET', key.pool, field, value) end
  return finish_call({1, expired, reaped, more and 1 or 0, ghosts, suspects})
end
