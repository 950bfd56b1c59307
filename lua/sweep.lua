-- include: dispatch
-- Find what nobody will report: expired requests, leases that ran out, replicas that fell silent,
-- workloads gone idle. Any replica may call it at any time.
--
-- Guarantees: runs at most once an interval, whoever calls; a bounded amount of work a call; a call that
-- left work behind says so, and may be repeated at once.
--
-- KEYS[1] epp:{POOL}:pool
-- ARGV[1] the calling replica
-- ARGV[2] interval_ms   ARGV[3] grace_ms: a silent replica's queued requests wait this long for adoption
-- ARGV[4] idle_ms: a workload is forgotten after
-- Returns {born, news, attempts, served, ran (0 or 1), expired, reclaimed, more (0 or 1)}
local owner, interval_ms, grace_ms, idle_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local CHUNK = 100
news.caller = owner
local more = 0

local state = redis.call('HMGET', key.pool, 'swept_ms', 'sweep_more', 'workload_cursor')
if not pool.known or (now_ms - tonumber(state[1] or 0) < interval_ms and state[2] ~= '1') then
  return {string.format('%.0f', pool.born), {}, 0, 0, 0, 0, 0, 0}
end

local expired = redis.call('ZRANGEBYSCORE', key.deadlines, '-inf', now_ms, 'LIMIT', 0, CHUNK)
for _, id in ipairs(expired) do
  local r = record.read(id)
  local held = r.state == 'held'
  finish_request(r, held and 'abandoned' or 'expired')
  if not held then news.tell(r.owner, id, 'expired') end
end

local reaped = redis.call('ZRANGEBYSCORE', key.inflight, '-inf', now_ms, 'LIMIT', 0, CHUNK)
for _, id in ipairs(reaped) do finish_request(record.read(id), 'reclaimed') end

-- A silent replica's queued requests: walk the waiting ones by deadline, a chunk a call. What moves
-- behind the walk's back is held by dispatch when its turn comes, or ends with its TTL.
local silent = redis.call('ZRANGEBYSCORE', key.replicas, '-inf', now_ms - pool.silence_ms, 'LIMIT', 0, 1)[1]
if silent then
  local from = tonumber(redis.call('HGET', key.orphans, silent) or 0)
  local ids = redis.call('ZRANGE', key.deadlines, from, from + CHUNK - 1)
  for _, id in ipairs(ids) do
    local r = record.read(id)
    if r.owner == silent and r.state == 'queued' then queue.hold(r, now_ms + grace_ms) end
  end
  if #ids == CHUNK then
    redis.call('HSET', key.orphans, silent, from + CHUNK)
    more = 1
  else
    redis.call('ZREM', key.replicas, silent)
    redis.call('HDEL', key.about, silent)
    redis.call('HDEL', key.orphans, silent)
    redis.call('DEL', key.inbox(silent))
  end
end

local scan = redis.call('HSCAN', key.workloads, state[3] or '0', 'COUNT', CHUNK)
for i = 1, #scan[2], 2 do
  local _, active, _, _, last_ms = unpack(workloads.parse(scan[2][i + 1]))
  if active == 0 and now_ms - last_ms > idle_ms then
    redis.call('HDEL', key.workloads, scan[2][i])
  end
end

-- At rest no flow has a claim: tags start anew from the highest, and finish tags at or below v say nothing.
for _, band in ipairs({0, 1, 2}) do
  local v = queue.vtime(band)
  if pool.queued == 0 and pool.stock == 0 then
    local top = redis.call('ZRANGE', key.finish(band), -1, -1, 'WITHSCORES')
    if top[2] then
      v = math.max(v, tonumber(top[2]))
      redis.call('HSET', key.pool, 'vtime:' .. band, v)
    end
  end
  redis.call('ZREMRANGEBYSCORE', key.finish(band), '-inf', v)
end

if #expired == CHUNK or #reaped == CHUNK then more = 1 end
redis.call('HSET', key.pool, 'swept_ms', now_ms, 'sweep_more', more, 'workload_cursor', scan[1])
local born, mine, attempts, served = conclude()
return {born, mine, attempts, served, 1, #expired, #reaped, more}
