-- include: settings
-- Set what the fleet shares by decision rather than by counting: settings and endpoints. The first call
-- brings the pool into being; what now fits is dispatched.
--
-- Guarantees: an endpoint that leaves keeps its count until its last request ends.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica
-- args[2] config version      args[3] endpoints version
-- args[4] settings: JSON, named as docs/redis-schema.md lists them
-- then pairs: endpoint, JSON {labels, draining}
-- Returns {born, news, attempts, served, upper, lower, ready}; bounds as strings
local FIRST_ENDPOINT = 5
local function publish(args)
  forget_news(args[1])
  local wanted, ready, marked, addresses = {}, 0, endpoints.marked(), {}
  for at = FIRST_ENDPOINT, #args, 2 do addresses[#addresses + 1] = args[at] end
  endpoints.prefetch(addresses, #addresses)
  local known = redis.call('HGETALL', key.endpoints)
  local former = {}
  for i = 1, #known, 2 do former[known[i]] = known[i + 1] end
  for at = FIRST_ENDPOINT, #args, 2 do
    local address, about = args[at], args[at + 1]
    local draining = endpoints.is_draining(about) or marked[address]
    wanted[address] = true
    if not draining then ready = ready + 1 end
    if former[address] ~= about then later('HSET', key.endpoints, address, about) end
    endpoints.list(address, draining)
  end
  send(key.endpoints)
  for i = 1, #known, 2 do
    local address = known[i]
    if not wanted[address] then
      write_now('HDEL', key.endpoints, address)
      endpoints.forget_marks(address)
      endpoints.unlist(address)
    end
  end
  -- What is counted at an endpoint that nobody has published stays counted, but takes nothing new.
  for _, address in ipairs(redis.call('ZRANGE', key.load, 0, -1)) do
    if not (wanted[address] or former[address]) then endpoints.unlist(address) end
  end
  if not pool.known then
    pool.born = now_us
    pool.credit = 1
    pool.known = true
  end
  local overrides = redis.call('HGET', key.pool, 'overrides')
  later('HSET', key.pool, 'config_version', args[2])
  later('HSET', key.pool, 'endpoints_version', args[3])
  later('HSET', key.pool, 'base', args[4])
  put_settings(cjson.decode(args[4]), overrides and cjson.decode(overrides) or {})
  pool.ready = ready
  pool.bound()
  local head = conclude()
  head[5], head[6], head[7] = full(pool.upper), full(pool.lower), ready
  return head
end
