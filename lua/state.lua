-- include: pool queue
-- What an operator sees at a glance. Reads only.
--
-- KEYS[1] epp:{POOL}:pool
-- ARGV[1] silence_ms after which a replica counts as gone
-- Returns {born, now_us, stock, queued, upper, lower, ready, inflight members, dispatches, ended,
--   {vtime, backlogged flows, queued} of each band, live replicas' {id, last_ms, about}, {endpoint, load}}
local silence_ms = tonumber(ARGV[1])
local bands = {}
for band = 0, 2 do
  bands[#bands + 1] = string.format('%.17g', queue.vtime(band))
  bands[#bands + 1] = redis.call('ZCARD', key.flows(band))
  bands[#bands + 1] = pool['queued:' .. band]
end
local replicas = {}
for i, id in ipairs(redis.call('ZRANGEBYSCORE', key.replicas, now_ms - silence_ms, '+inf')) do
  if i > 256 then break end
  replicas[#replicas + 1] = id
  replicas[#replicas + 1] = redis.call('ZSCORE', key.replicas, id)
  replicas[#replicas + 1] = redis.call('HGET', key.about, id) or '{}'
end
return {
  string.format('%.0f', pool.born), string.format('%.0f', now_us), string.format('%.17g', pool.stock),
  pool.queued, string.format('%.17g', pool.upper), string.format('%.17g', pool.lower), pool.ready,
  redis.call('ZCARD', key.inflight), string.format('%.0f', pool.dispatches),
  string.format('%.0f', pool.ended), bands, replicas,
  redis.call('ZRANGE', key.load, 0, 999, 'WITHSCORES'),
}
