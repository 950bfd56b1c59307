-- include: queue
-- What an operator sees at a glance. Reads only.
--
-- keys[1] epp:{POOL}:pool
-- args[1] silence_ms after which a replica counts as gone
-- Returns {born, now_us, stock, queued, upper, lower, ready, inflight members, dispatches, ended,
--   {vtime, backlogged lanes, queued} of each band, {id, what it says of itself (JSON)} of each live replica,
--   {endpoint, load},
--   guard dispatches, credit, overdue, drain rate a second, paused, tuned version}
local function state(args)
  local bands = {}
  for _, band in ipairs(BANDS) do
    bands[#bands + 1] = full(pool[V[band]])
    bands[#bands + 1] = redis.call('ZCARD', key.flows[band]) + redis.call('ZCARD', key.parked[band])
    bands[#bands + 1] = pool[QUEUED[band]]
  end
  local replicas = {}
  for i, id in ipairs(redis.call('ZRANGEBYSCORE', key.replicas, '(' .. (now_ms - tonumber(args[1])), '+inf')) do
    if i > 256 then break end
    replicas[#replicas + 1] = id
    -- What it has served, on the second line, is long and not asked for here.
    replicas[#replicas + 1] = string.match(redis.call('HGET', key.about, id) or '{}', '^[^\n]*')
  end
  return {
    full(pool.born), full(now_us), full(pool.stock), pool.queued, full(pool.upper), full(pool.lower), pool.ready,
    redis.call('ZCARD', key.inflight), full(pool.dispatches), full(pool.ended), bands, replicas,
    redis.call('ZRANGE', key.load, 0, 999, 'WITHSCORES'), full(pool.guards), full(pool.credit), pool.overdue,
    full(pool.rate), settings.paused or 0, redis.call('HGET', key.pool, 'tuned_version') or '',
  }
end
