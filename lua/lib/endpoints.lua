-- include: pool
-- Live load of every endpoint, and the choice among them. An endpoint that must take nothing new
-- (draining, or gone but still serving) is kept above UNPICKABLE, so its count stays exact.
local UNPICKABLE = 1e9
local endpoints = {}
-- Best first, least loaded; equals take turns by `turn`. `candidates` is '*' (all) or 'a,b,c'.
-- Returns 'a,b,c' with up to `fallbacks` more than one, or nil when nothing can be picked.
function endpoints.pick(candidates, turn)
  local chosen, want = {}, pool.fallbacks + 1
  if candidates == '*' then
    local best = redis.call('ZRANGE', key.load, 0, 0, 'WITHSCORES')
    if not best[1] or tonumber(best[2]) >= UNPICKABLE then return nil end
    local equals = redis.call('ZCOUNT', key.load, best[2], best[2])
    local first = turn % equals
    -- The least loaded from `first` on, then those before it, then the next best.
    local function take(from, before)
      if #chosen >= want or from >= before then return end
      local last = math.min(before, from + want - #chosen) - 1
      for _, address in ipairs(redis.call('ZRANGE', key.load, from, last)) do
        chosen[#chosen + 1] = address
      end
    end
    take(first, equals)
    take(0, first)
    take(equals, pool.ready)
    return table.concat(chosen, ',')
  end
  local asked, seen, ranked = {}, {}, {}
  for address in string.gmatch(candidates, '[^,]+') do
    if not seen[address] then asked[#asked + 1] = address end
    seen[address] = true
  end
  for i = 1, #asked, 500 do
    local scores = redis.call('ZMSCORE', key.load, unpack(asked, i, math.min(i + 499, #asked)))
    for j, score in ipairs(scores) do
      local at = i + j - 1
      if score and tonumber(score) < UNPICKABLE then
        ranked[#ranked + 1] = {asked[at], tonumber(score), (at + turn) % #asked}
      end
    end
  end
  if #ranked == 0 then return nil end
  table.sort(ranked, function(a, b) return a[2] < b[2] or (a[2] == b[2] and a[3] < b[3]) end)
  for i = 1, math.min(want, #ranked) do chosen[i] = ranked[i][1] end
  return table.concat(chosen, ',')
end
function endpoints.first(list) return string.match(list, '^[^,]+') end
function endpoints.reserve(address)
  if tonumber(redis.call('ZINCRBY', key.load, 1, address)) == 1
      and redis.call('HEXISTS', key.endpoints, address) == 0 then
    redis.call('ZINCRBY', key.load, UNPICKABLE, address)
  end
end
function endpoints.release(address)
  if tonumber(redis.call('ZINCRBY', key.load, -1, address)) == UNPICKABLE
      and redis.call('HEXISTS', key.endpoints, address) == 0 then
    redis.call('ZREM', key.load, address)
  end
end
