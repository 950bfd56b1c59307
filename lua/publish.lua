-- include: dispatch
-- Set what the fleet shares by decision rather than by counting: bounds, capacities, times, endpoints.
-- The first call brings the pool into being; what now fits is dispatched.
--
-- Guarantees: an endpoint that leaves keeps its count until its last request ends.
--
-- KEYS[1] epp:{POOL}:pool
-- ARGV[1] the calling replica
-- ARGV[2] config version      ARGV[3] endpoints version
-- ARGV[4] settings: JSON {name: number}, as lib/pool.lua lists them, and upper_per, lower_per (a backend)
-- then pairs: endpoint, JSON {labels, draining}
-- Returns {born, news, attempts, served, upper, lower, ready}; bounds as strings
local FIRST_ENDPOINT = 5
local owner, config_version, endpoints_version, settings = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
news.caller = owner
pool.share(settings)

local wanted, ready = {}, 0
for at = FIRST_ENDPOINT, #ARGV, 2 do
  local address, about = ARGV[at], ARGV[at + 1]
  local draining = cjson.decode(about).draining
  wanted[address] = true
  if not draining then ready = ready + 1 end
  redis.call('HSET', key.endpoints, address, about)
  local load = tonumber(redis.call('ZSCORE', key.load, address) or 0)
  local count = load >= UNPICKABLE and load - UNPICKABLE or load
  redis.call('ZADD', key.load, draining and count + UNPICKABLE or count, address)
end
for _, address in ipairs(redis.call('HKEYS', key.endpoints)) do
  if not wanted[address] then
    redis.call('HDEL', key.endpoints, address)
    local load = tonumber(redis.call('ZSCORE', key.load, address) or 0)
    if load == 0 or load == UNPICKABLE then
      redis.call('ZREM', key.load, address)
    elseif load < UNPICKABLE then
      redis.call('ZADD', key.load, load + UNPICKABLE, address)
    end
  end
end

pool.set('ready', ready)
-- Nine digits undo binary rounding: 20 backends at 1.15 are 23, not 22.999….
local function scaled(bound) return tonumber(string.format('%.9g', bound * ready)) end
pool.set('upper', scaled(pool.upper_per))
pool.set('lower', math.max(scaled(pool.lower_per), 1e-9)) -- at 0 an empty pool still takes one
if not pool.known then
  pool.set('born', now_us)
  pool.known = true
end
redis.call('HSET', key.pool, 'config_version', config_version, 'endpoints_version', endpoints_version,
  'settings', settings)
local born, mine, attempts, served = conclude()
return {
  born, mine, attempts, served, string.format('%.17g', pool.upper), string.format('%.17g', pool.lower), ready,
}
