-- include: dispatch answers tombstones
-- Find what nobody will report: expired requests, leases that ran out, replicas that fell silent,
-- workloads gone idle; and walk the waiting requests whose order time or a new policy has changed. Any
-- replica may call it at any time.
--
-- Guarantees: runs at most once an interval, whoever calls; a bounded amount of work a call; a call that
-- left work behind says so, and may be repeated at once.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica
-- args[2] interval_ms   args[3] grace_ms: a silent replica's queued requests wait this long for adoption
-- args[4] idle_ms: a workload is forgotten after
-- args[5] unseen_ms: a placed request without a sign of life for so long may be a ghost
-- Returns {born, news, attempts, served, ran (0 or 1), expired, reclaimed, more (0 or 1), ghosts,
--   suspects (endpoints whose pages may show ghosts)}
local CHUNK = 32 -- requests that a call ends, holds or looks at, at most
local REFILED = 16 -- and how many it files anew: each of them leaves one order and enters another
local LIGHT = 500 -- entries of what is merely forgotten
local WALKS = 150 -- calls an interval that go on with the walk, at most
local DOWN_MS = 10000
local MOST_IDLE_LANES = 10000 -- of a band, whose finish tags, and when they were preempted, are kept
local TRANSIT_MS = 1000 -- a request may take so long from its placement to its endpoint's page
local MOST_RECENT = 1000 -- requests whose endpoints a call counts, at most; above, ghosts end with their lease
local PRESSED = 0.9 -- of the capacity: below it the memory of who was preempted ends

local function is_running(r) return r and (r.state == 'placed' or r.state == 'granted') end

-- Its end has not been heard; it may run all the same, and is then told of again.
local function reclaim(r, note_text)
  if r.state == 'placed' then tombstones.give_up(r.id) end
  finish_request(r, 'reclaimed', note_text)
end

local function reap(most)
  local reaped = 0
  for _ = 1, STRAYS do
    local ids = redis.call('ZRANGEBYSCORE', key.inflight, '-inf', now_ms, 'LIMIT', 0, most)
    record.prefetch(ids, #ids)
    for _, id in ipairs(ids) do
      local r = record.read(id)
      if is_running(r) then
        reclaim(r)
        reaped = reaped + 1
      else
        drop_stray('ZREM', key.inflight, id)
      end
    end
    if reaped > 0 or #ids < most then break end
  end
  return reaped
end

-- How many requests an endpoint has, by each of its last two pages: the higher count, and the moment of the older
-- page; nil if it does not tell.
local function pages_of(text)
  local known, page = pcall(cjson.decode, text)
  if not known or type(page) ~= 'table' then return nil end
  local at, before = tonumber(page.at), tonumber(page.before) -- by TIME
  local queued, running = tonumber(page.waiting), tonumber(page.running)
  if not (at and before and queued and running) then return nil end
  at, before = at + clock_shift_ms, before + clock_shift_ms
  if at > now_ms + 1000 or before > at then return nil end -- from before a step
  return math.max(queued + running, tonumber(page.before_load) or math.huge), before
end

-- How many placed requests of each endpoint have had a sign of life since `since_ms`: they may have been placed
-- since. nil if they are too many to be counted.
local function count_recent(since_ms)
  local recent, first = {}, since_ms + settings.lease_ms
  if redis.call('ZCOUNT', key.inflight, '(' .. first, '+inf') > MOST_RECENT then return nil end
  local ids = redis.call('ZRANGEBYSCORE', key.inflight, '(' .. first, '+inf')
  record.prefetch(ids, #ids)
  for _, id in ipairs(ids) do
    local r = record.read(id)
    if r and r.state == 'placed' then
      local address = endpoints.first(r.endpoints)
      recent[address] = (recent[address] or 0) + 1
    end
  end
  return recent
end

-- Placed requests that may have ended unheard, the longest silent first: {id, seen_ms, by_ms...}, three values each.
-- Both of an endpoint's last pages must be newer than `by_ms` to tell of one. Those are the ones without a sign of
-- life for `unseen_ms`, and the ones that an access log suspects (suspect.lua), if they have had none since.
local function silent_requests(unseen_ms, limit)
  send(key.inflight)
  local found = {}
  local latest = now_ms + settings.lease_ms - unseen_ms
  if latest > now_ms then
    local leases = redis.call('ZRANGEBYSCORE', key.inflight, '(' .. now_ms, latest, 'WITHSCORES', 'LIMIT', 0, limit)
    for i = 1, #leases, 2 do
      local seen_ms = tonumber(leases[i + 1]) - settings.lease_ms
      table.insert(found, {id = leases[i], seen_ms = seen_ms, by_ms = seen_ms})
    end
  end
  send(key.suspects)
  local suspects = redis.call('ZRANGE', key.suspects, 0, limit - 1, 'WITHSCORES')
  for i = 1, #suspects, 2 do
    local id = suspects[i]
    local seen_ms = tonumber(redis.call('ZSCORE', key.inflight, id) or 0) - settings.lease_ms
    if seen_ms > 0 and seen_ms <= tonumber(suspects[i + 1]) and seen_ms > now_ms - unseen_ms then
      table.insert(found, {id = id, seen_ms = seen_ms, by_ms = seen_ms + TRANSIT_MS})
    else
      later('ZREM', key.suspects, id) -- it has ended, lives, or is found by its silence alone
    end
  end
  return found
end

-- Give up placed requests that have ended without anybody hearing of it (ghosts): of those that are silent, oldest
-- first, as many as both of the last pages of their endpoint lack. Both are newer than the last sign of life, so that
-- a request that runs is on them. Returns how many were given up, and the endpoints whose pages may show more.
local function reclaim_ghosts(unseen_ms, limit)
  local found = silent_requests(unseen_ms, limit)
  if #found == 0 then return 0, {} end
  local ids, silent, suspects = {}, {}, {}
  for i, one in ipairs(found) do ids[i] = one.id end
  record.prefetch(ids, #ids)
  for _, one in ipairs(found) do
    one.r = record.read(one.id)
    if not is_running(one.r) then
      drop_stray('ZREM', key.inflight, one.id)
      later('ZREM', key.suspects, one.id)
    elseif one.r.state == 'placed' then
      local address = endpoints.first(one.r.endpoints)
      if not silent[address] then
        silent[address] = {}
        suspects[#suspects + 1] = address
      end
      table.insert(silent[address], one)
    end
  end
  local ghosts = 0
  local texts = #suspects > 0 and redis.call('HMGET', key.metrics, unpack(suspects)) or {}
  for i, address in ipairs(suspects) do
    local reported, older_ms
    if texts[i] then reported, older_ms = pages_of(texts[i]) end
    if reported and endpoints.booked(address) > reported then
      local recent = count_recent(older_ms - TRANSIT_MS)
      local missing = recent and endpoints.booked(address) - (recent[address] or 0) - reported or 0
      for _, one in ipairs(silent[address]) do
        if missing < 1 then break end
        if one.by_ms < older_ms then
          reclaim(one.r, 'ghost')
          missing, ghosts = missing - 1, ghosts + 1
        end
      end
    end
  end
  return ghosts, suspects
end

-- A silent replica's queued requests, found by a walk over all, a chunk a call. What comes behind the walk's
-- back is held by dispatch when its turn comes, or ends with its TTL.
local function hold_orphans(grace_ms, most)
  local silent = redis.call('ZRANGEBYSCORE', key.replicas, '-inf', now_ms - settings.silence_ms, 'LIMIT', 0, 1)[1]
  if not silent then return false end
  local scan = redis.call('HSCAN', key.requests, redis.call('HGET', key.orphans, silent) or '0', 'COUNT', most)
  for i = 1, #scan[2], 2 do
    local r = record.meet(scan[2][i], scan[2][i + 1])
    if r and r.owner == silent and r.state == 'queued' then queue.hold(r, now_ms + grace_ms) end
  end
  if scan[1] ~= '0' then
    later('HSET', key.orphans, silent, scan[1])
    return true
  end
  later('ZREM', key.replicas, silent)
  later('HDEL', key.about, silent)
  later('HDEL', key.orphans, silent)
  unlink_later(key.inbox[silent]) -- what this call has told it goes too
  return false
end

local function forget_idle(hash, cursor, kind, idle_ms)
  local scan = redis.call('HSCAN', hash, cursor, 'COUNT', 2 * CHUNK)
  for i = 1, #scan[2], 2 do
    if kind.idle(scan[2][i + 1], idle_ms) then kind.drop(scan[2][i]) end
  end
  return scan[1]
end

-- A stretch of the walk over all requests. Returns where it stands; '0' when it is through.
local function walk(cursor, most)
  if pool.refiling == 1 then most = math.min(most, REFILED) end
  local scan = redis.call('HSCAN', key.requests, cursor, 'COUNT', most)
  for i = 1, #scan[2], 2 do
    local r = record.meet(scan[2][i], scan[2][i + 1])
    if r and r.state == 'queued' then
      if pool.refiling == 1 then
        queue.refile(r)
      else
        order.refresh(r, queue.lane(r))
      end
    end
  end
  if scan[1] == '0' then pool.refiling = 0 end
  return scan[1]
end

-- How fast the queue drains, for Retry-After.
local function measure_rate(swept_ms, dispatches)
  if swept_ms == 0 or now_ms == swept_ms then return end
  local rate = (pool.dispatches - dispatches) * 1000 / (now_ms - swept_ms)
  pool.rate = pool.rate == 0 and rate or (pool.rate + rate) / 2
end

-- Of a set beyond MOST_IDLE_LANES, its lowest, behind `from` others that leave it anyway. Returns how many.
local function drop_lowest(sorted, from)
  local surplus = math.min(redis.call('ZCARD', sorted) - from - MOST_IDLE_LANES, LIGHT)
  if surplus > 0 then
    for _, lane in ipairs(redis.call('ZRANGE', sorted, from, from + surplus - 1)) do later('ZREM', sorted, lane) end
  end
  return surplus
end

-- What was written by a clock that was ahead (another server's, before a failover) ends when it would have by now.
local AHEAD_MS = 1000
local function bring_back(moments, life_ms)
  local latest = now_ms + life_ms - 0.5 -- as heartbeats have it
  local ahead_of = redis.call('ZRANGEBYSCORE', moments, '(' .. latest + AHEAD_MS, '+inf', 'LIMIT', 0, LIGHT)
  for _, member in ipairs(ahead_of) do later('ZADD', moments, latest, member) end
end

-- Where nobody waits, no lane does, and nothing is overdue: what stands there is a stray.
local function drop_idle(band)
  if pool[QUEUED[band]] > 0 then return end
  for _, places in ipairs({key.flows[band], key.parked[band]}) do
    for _, lane in ipairs(redis.call('ZRANGE', ahead.anew(places), 0, CHUNK - 1)) do
      for _, id in ipairs(redis.call('ZRANGE', ahead.anew(key.queue[band][lane]), 0, CHUNK - 1)) do
        local r = record.read(id)
        if not (r and r.state == 'queued') then queue.drop_stray(id, band, lane) end
      end
      if queue.length(band, lane) == 0 then drop_stray('ZREM', places, lane) end
    end
  end
end
local function drop_overdue()
  if pool.queued > 0 then return end
  pool.overdue = 0
  for _, id in ipairs(redis.call('ZRANGE', key.overdue, 0, CHUNK - 1)) do drop_stray('ZREM', key.overdue, id) end
end

-- At rest no lane has a claim: tags start anew from the highest, and finish tags at or below v say nothing.
local function age_tags(band)
  local v = pool[V[band]]
  send(key.finish[band])
  if pool.queued == 0 and pool.stock == 0 then
    local top = redis.call('ZRANGE', key.finish[band], -1, -1, 'WITHSCORES')
    if top[2] then v = math.max(v, tonumber(top[2])) end
    pool[V[band]] = v
  end
  -- Not all at once: a million of them would hold everyone up.
  local stale = redis.call('ZRANGEBYSCORE', key.finish[band], '-inf', v, 'LIMIT', 0, LIGHT)
  for _, lane in ipairs(stale) do later('ZREM', key.finish[band], lane) end
  -- A client with a new flow for each request keeps v where it is. What is forgotten is what is owed least: at
  -- most one charge of a flow that has nothing waiting.
  local surplus = drop_lowest(key.finish[band], #stale)
  local memories = drop_lowest(ahead.anew(key.preempted[band]), 0)
  return #stale == LIGHT or surplus == LIGHT or memories == LIGHT
end

local function sweep(args)
  local owner, interval_ms, grace_ms, idle_ms = args[1], tonumber(args[2]), tonumber(args[3]), tonumber(args[4])
  local unseen_ms = tonumber(args[5])
  forget_news(owner)
  local state = redis.call('HMGET', key.pool, 'swept_ms', 'sweep_more', 'workload_cursor', 'answer_cursor', 'walk',
    'walks', 'swept_dispatches')
  local swept_ms = tonumber(state[1] or 0)
  local fresh = now_ms - swept_ms >= interval_ms or swept_ms > now_ms
  if not pool.known or not (fresh or state[2] == '1') then
    return {full(pool.born), {}, 0, 0, 0, 0, 0, 0, 0, {}}
  end
  local more = false
  local ran, expired = run_timers(CHUNK)
  local reaped = ran < CHUNK and reap(CHUNK - ran) or 0
  local ghosts, suspects = 0, {}
  if fresh and ran + reaped < CHUNK then ghosts, suspects = reclaim_ghosts(unseen_ms, CHUNK - ran - reaped) end
  local left = CHUNK - ran - reaped - ghosts
  if left == 0 or hold_orphans(grace_ms, left) then more = true end
  local walks = fresh and 0 or tonumber(state[6] or 0)
  local walked = state[5] or '0'
  if pool.refiling == 1 or (settings.ordering == 'workload-aware' and (fresh or walked ~= '0')) then
    if left > 0 then walked, walks = walk(walked, left), walks + 1 end
    if walked ~= '0' and (pool.refiling == 1 or walks < WALKS) then more = true end
  end
  for _, band in ipairs(BANDS) do
    for _, lane in ipairs(redis.call('ZRANGE', key.parked[band], 0, CHUNK - 1)) do queue.unpark(band, lane) end
    drop_idle(band)
    if fresh then queue.heal(band) end
    if age_tags(band) then more = true end
  end
  if fresh then
    for _, band in ipairs(BANDS) do queue.rebase(band) end
    queue.rebase_bands()
  end
  drop_overdue()
  if tombstones.forget(LIGHT) then more = true end
  if pool.pressed == 1 and pool.queued < PRESSED * settings.total_capacity then
    if victims.relax(LIGHT) then more = true else pool.pressed = 0 end
  end
  if fresh then
    bring_back(key.replicas, 0)
    bring_back(key.inflight, settings.lease_ms)
    endpoints.lapse(DOWN_MS)
    victims.complete(LIGHT)
    measure_rate(swept_ms, tonumber(state[7] or 0))
    later('HSET', key.pool, 'swept_ms', now_ms)
    later('HSET', key.pool, 'swept_dispatches', pool.dispatches)
  end
  local stands = {sweep_more = more and 1 or 0, walk = walked, walks = walks,
    workload_cursor = forget_idle(key.workloads, state[3] or '0', workloads, idle_ms),
    answer_cursor = forget_idle(key.answers, state[4] or '0', answers, idle_ms)}
  for field, value in pairs(stands) do later('HSET', key.pool, field, value) end
  local head = conclude()
  head[5], head[6], head[7], head[8], head[9], head[10] = 1, expired, reaped, more and 1 or 0, ghosts, suspects
  return head
end
