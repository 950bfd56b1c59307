-- include: dispatch
-- Choose the variant of a model that a request is sent as. The id proposes one; the counts of the whole fleet decide.
--
-- Guarantees: after any number of requests each of two variants has had its exact share of them, give or take one
-- request; with more variants, two requests. An id that comes again while it is remembered gets the same variant.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then for each request: its split (a hash of model, variants and weights), the weights
--   joined by blanks, its id (a hash of the request's id, the model and the variants), the variant that it proposes
--
-- Returns {epoch, notifications, attempts, served, reply...}: the variant's number, from 1

local IDLE_MS = 3600000 -- a split that is unused for so long is forgotten: its weights have probably changed
local LOOKED_AT = 32 -- splits that are checked for this whenever a new one appears

-- The surplus of a variant is how many requests more than its exact share it was given, times the sum of the weights,
-- so that it is a whole number.
local splits, known -- of this call: split -> {weights, sum, surplus of each}; id -> its variant

-- Drop splits that are idle, of a random few.
local function forget_idle_splits()
  local some = read('HRANDFIELD', key.splits, LOOKED_AT, 'WITHVALUES') or {}
  for i = 1, #some, 2 do
    local used_ms = tonumber(string.match(some[i + 1], '^%d+'))
    if not used_ms or used_ms < now_ms - IDLE_MS then defer_write('HDEL', key.splits, some[i]) end
  end
end

local function read_split(name, weights_text)
  local split = splits[name]
  if split then return split end
  local text = read('HGET', key.splits, name)
  if not text then forget_idle_splits() end
  local stored, weights, surplus, sum = {}, {}, {}, 0 -- stored: when it was last used, then the surpluses
  for number in string.gmatch(text or '', '%S+') do stored[#stored + 1] = tonumber(number) end
  for weight in string.gmatch(weights_text, '%S+') do weights[#weights + 1] = tonumber(weight) end
  local valid = #stored == #weights + 1
  if text and not valid then strays = strays + 1 end
  for i = 1, #weights do
    surplus[i] = valid and stored[i + 1] or 0
    sum = sum + weights[i]
  end
  split = {weights = weights, surplus = surplus, sum = sum}
  splits[name] = split
  return split
end

-- The variant of the next request, by the same rule as `Shares` of app/picker_fleet/traffic_split.py without Redis.
local function choose(split, proposed)
  local surplus, weights, sum = split.surplus, split.weights, split.sum
  local last = 1
  for i = 1, #surplus do
    surplus[i] = surplus[i] - weights[i]
    if surplus[i] < surplus[last] then last = i end
  end
  local keeps_up = last == proposed or surplus[last] >= -sum
  local chosen = keeps_up and surplus[proposed] <= 0 and proposed or last
  surplus[chosen] = surplus[chosen] + sum
  return chosen
end

local function split(args)
  splits, known = {}, {}
  local ids, count = column(args, SPLIT_ITEM, 3)
  local scores = redis.call('ZMSCORE', key.variants, unpack(ids, 1, count))
  for i = 1, count do
    local score = tonumber(scores[i] or nil)
    if score then known[ids[i]] = math.floor(score % 1 * MOST_VARIANTS + 0.5) end
  end
  return for_each_item(args, SPLIT_ITEM, function(_, name, weights, id, proposed)
    local chosen = known[id]
    if not chosen then
      local asked = read_split(name, weights)
      chosen = choose(asked, tonumber(proposed))
      known[id] = chosen
      defer_write('ZADD', key.variants, now_ms + chosen / MOST_VARIANTS, id)
      defer_write('HSET', key.splits, name, now_ms .. ' ' .. table.concat(asked.surplus, ' '))
    end
    return chosen
  end)
end
