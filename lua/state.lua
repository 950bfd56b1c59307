-- include: flows usage
-- Return the counters, bounds, replicas and loads of the pool.
--
-- Guarantees: the script only reads.
--
-- keys[1] epp:{POOL}:pool
-- args[1] silence_ms: a replica without a heartbeat for this long counts as gone
--
-- Returns a list of these values:
--   epoch and now_us: when the pool was created or rebuilt, and the present time
--   stock: cost in flight
--   queued: number of waiting requests
--   upper and lower: the stock's bounds
--   ready: number of ready endpoints
--   in flight, dispatches, ended: number of requests in flight, of all grants, and of all ended requests
--   list of five values of each band, the highest band first: priority, virtual time v, number of flow queues with
--     waiting requests, number of waiting requests, bytes of their bodies
--   list of id and replica info (JSON) of each live replica
--   list of address and load of each endpoint: requests in flight, plus 1e9 while the endpoint takes no new requests
--   list of the limits of these endpoints, in the same order ('' without a limit); empty if no endpoint has a limit
--   list of the tokens in flight on these endpoints, in the same order; empty unless the fleet finds limits in tokens
--   guards, credit, overdue: grants by the starvation guard, the guard's credit, number of overdue requests
--   rate: dispatches per second
--   paused: 1 while an operator has paused the queue, else 0
--   tuned version: number of the last live change
--   retry after: estimated seconds until the queue has drained (1 to 60)
--   refusals: JSON of endpoint -> requests that the endpoint has refused (lua/report_fault.lua)
--   list of address and load of each endpoint of the stage prefill: prefills in flight, plus 1e9 as above
--   list of the limits of these endpoints, in the same order ('' without a limit); empty if none has a limit
--   list of name, base and slope of each model whose prompts are known (lib/usage.lua)

local function state(args)
  local of_bands = {}
  for _, band in ipairs(BANDS) do
    of_bands[#of_bands + 1] = PRIORITY[band]
    of_bands[#of_bands + 1] = exact(pool[V[band]])
    of_bands[#of_bands + 1] = queue.count_flow_queues(band)
    of_bands[#of_bands + 1] = pool[QUEUED[band]]
    of_bands[#of_bands + 1] = exact(bands.bytes(band))
  end
  local replicas = {}
  local ids = read('ZRANGEBYSCORE', key.replicas, '(' .. (now_ms - tonumber(args[1])), '+inf', 'LIMIT', 0, 256)
  local infos = #ids > 0 and read('HMGET', key.replica_info, unpack(ids)) or {}
  for i, id in ipairs(ids) do
    replicas[2 * i - 1] = id
    -- Leave out the second line, the replica's counts of served requests: the line is long, and no caller needs it.
    replicas[2 * i] = string.match(infos[i] or '{}', '^[^\n]*')
  end
  local loads, limits, amounts = read('ZRANGE', key.load, 0, 999, 'WITHSCORES'), {}, {}
  local limit_of = settings.token_caps and endpoints.token_cap or endpoints.cap
  for i = 1, endpoints.caps and #loads or 0, 2 do
    limits[#limits + 1] = tostring(limit_of(loads[i]) or '')
    if settings.token_caps then amounts[#amounts + 1] = exact(endpoints.amounts({loads[i]})[1]) end
  end
  local prefill_loads, prefill_limits = read('ZRANGE', key.prefill_load, 0, 999, 'WITHSCORES'), {}
  for i = 1, prefill.caps and #prefill_loads or 0, 2 do
    prefill_limits[#prefill_limits + 1] = tostring(prefill.cap(prefill_loads[i]) or '')
  end
  return {
    exact(pool.epoch), exact(now_us), exact(pool.stock), pool.queued, exact(pool.upper), exact(pool.lower), pool.ready,
    read('ZCARD', key.inflight), exact(pool.dispatches), exact(pool.ended), of_bands, replicas,
    loads, limits, amounts, exact(pool.guards), exact(pool.credit), pool.overdue,
    exact(pool.rate), settings.paused or 0, read('HGET', key.pool, 'tuned_version') or '', pool.retry_after_s(),
    read('HGET', key.pool, 'endpoint_refusals') or '{}', prefill_loads, prefill_limits, usage.prompt_lines(),
  }
end
