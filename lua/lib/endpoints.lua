-- include: pool
-- Live load of every endpoint, and the choice among them. An endpoint that must take nothing new
-- (draining, or gone but still serving) is kept above UNPICKABLE, so its count stays exact.
-- A flow may have a limit of requests in flight on each endpoint; `limits` counts those of such flows. An endpoint
-- may have one for all of them: `settings.caps`, endpoint -> limit; nil where none has one, and then nothing here
-- asks for it.
local UNPICKABLE = 1e9
local endpoints = {}
-- endpoint -> load, as this call knows it; it stays for the next one while nobody else has changed the pool.
local loads, loads_known = {}, 0
local MOST_LOADS = 1000 -- requests may name any number that nobody has heard of
local changed_loads = {}
local window, window_left -- the least loaded, and how many picks they are good for
local SMALL = 8 -- of fewer endpoints than that, all are in it, and it is good for any number
-- The first of 'a,b,c', searched once for each list that comes again and again.
local firsts, firsts_known = {}, 0
function endpoints.first(list)
  local first = firsts[list]
  if not first then
    if firsts_known >= 1000 then firsts, firsts_known = {}, 0 end
    first = string.match(list, '^[^,]*')
    firsts[list], firsts_known = first, firsts_known + 1
  end
  return first
end
-- Read the loads of the first `named` addresses in one go, each once.
local asked_addresses = {} -- filled again by each call
function endpoints.prefetch(addresses, named)
  local asked, count = asked_addresses, 0
  for i = 1, named do
    local address = addresses[i]
    if loads[address] == nil then
      count = count + 1
      asked[count], loads[address] = address, false
    end
  end
  loads_known = loads_known + count
  for first = 1, count, AT_MOST do
    local last = math.min(first + AT_MOST - 1, count)
    local scores = redis.call('ZMSCORE', key.load, unpack(asked, first, last))
    for i = first, last do loads[asked[i]] = tonumber(scores[i - first + 1] or -1) end -- -1: not listed
  end
end
local function load_of(address)
  if not loads[address] then
    loads[address] = tonumber(redis.call('ZSCORE', key.load, address) or -1) -- -1: not listed
    loads_known = loads_known + 1
  end
  return loads[address]
end
-- Requests in flight there, whether it takes new ones or not.
function endpoints.booked(address)
  local load = load_of(address)
  return load >= UNPICKABLE and load - UNPICKABLE or math.max(load, 0)
end
-- Whether it is published, or has requests in flight from when it was.
function endpoints.is_known(address) return load_of(address) >= 0 end
local function set_load(address, load)
  loads[address], changed_loads[address] = load, true
end
function endpoints.reserve(address)
  local load = loads[address] or load_of(address)
  if load < 0 then endpoints.all = nil end
  loads[address], changed_loads[address] = load < 0 and UNPICKABLE + 1 or load + 1, true
end
function endpoints.release(address)
  local load = loads[address] or load_of(address)
  if load <= 0 or load == UNPICKABLE then return end
  load = load - 1
  if load == UNPICKABLE and redis.call('HEXISTS', key.endpoints, address) == 0 then load = -1 end
  loads[address], changed_loads[address] = load, true
end
-- An endpoint that is published; what it has in flight stays counted.
function endpoints.list(address, draining)
  local load, count = load_of(address), endpoints.booked(address)
  local listed_load = draining and count + UNPICKABLE or count
  if listed_load ~= load then
    set_load(address, listed_load)
    window, endpoints.all = nil, nil -- it may be new
  end
end
-- Whether it is to take nothing new, by what it is published with. Most are published with the same, again and again.
local drains, drains_known = {}, 0
function endpoints.is_draining(about)
  local draining = drains[about]
  if draining == nil then
    if drains_known >= 1000 then drains, drains_known = {}, 0 end
    draining = cjson.decode(about).draining == true
    drains[about], drains_known = draining, drains_known + 1
  end
  return draining
end
-- One that is published no more: it takes nothing new, and is gone once its last request has ended.
function endpoints.unlist(address)
  local load = load_of(address)
  if load <= 0 or load == UNPICKABLE then
    set_load(address, -1)
  elseif load < UNPICKABLE then
    set_load(address, load + UNPICKABLE)
  end
end
-- Those worth looking at for one of `picks` requests: picks + want least loaded hold the best of each.
local function read_window(picks, want)
  local most = math.max(picks + want, SMALL)
  local flat, count = redis.call('ZRANGE', key.load, 0, most - 1, 'WITHSCORES'), 0
  window = {}
  for i = 1, #flat, 2 do
    local address = flat[i]
    if not loads[address] then loads[address] = tonumber(flat[i + 1]) end
    count = count + 1
    window[count] = address
  end
  loads_known, window_left = loads_known + count, count < SMALL and math.huge or most - want
end
-- Requests in flight of limited flows, by their fields of `limits`: as this call knows them, and what it has changed.
local limit_counts, changed_limits = {}, {}
local function flow_counts(fields)
  local counts, asked = {}, {}
  for i, field in ipairs(fields) do
    counts[i] = limit_counts[field]
    if not counts[i] then asked[#asked + 1] = field end
  end
  if #asked > 0 then
    local texts = redis.call('HMGET', key.limits, unpack(asked))
    for i, field in ipairs(asked) do limit_counts[field] = tonumber(texts[i] or 0) or 0 end
    for i, field in ipairs(fields) do counts[i] = limit_counts[field] end
  end
  return counts
end
-- The addresses of a list, and their scores by address if it has scores.
local function listed(candidates)
  local found, seen, scores = {}, {}, nil
  for address, score in string.gmatch(candidates, '([^,=]+)=?([^,]*)') do
    if not seen[address] and #found < 1000 then found[#found + 1] = address end
    seen[address] = true
    if score ~= '' then
      scores = scores or {}
      scores[address] = tonumber(score)
    end
  end
  endpoints.prefetch(found, #found)
  return found, scores
end
local function is_pickable(load) return load >= 0 and load < UNPICKABLE end
-- The addresses that are counted, read once a call (`all`).
function endpoints.everyone()
  if endpoints.all then return endpoints.all end
  local all, listed_ones = redis.call('ZRANGE', key.load, 0, -1), {}
  local count = #all
  for i = 1, count do listed_ones[all[i]] = true end
  for address in pairs(changed_loads) do
    if not listed_ones[address] then
      count = count + 1
      all[count] = address
    end
  end
  endpoints.prefetch(all, count)
  endpoints.all = all
  return all
end
-- How many more requests may be granted before every endpoint that takes new ones is at its limit. Whoever is
-- granted, and not placed yet, will need a place too. Only asked where endpoints have limits.
function endpoints.places()
  local caps, left, placed = settings.caps, 0, 0
  for _, address in ipairs(endpoints.everyone()) do
    local load = loads[address] or load_of(address)
    if is_pickable(load) then
      local cap = caps[address]
      if not cap then return math.huge end
      left, placed = left + math.max(cap - load, 0), placed + load
    elseif load >= 0 then
      placed = placed + load - UNPICKABLE
    end
  end
  send(key.inflight)
  return left - (redis.call('ZCARD', key.inflight) - placed)
end
-- Whether an endpoint with a limit takes one more.
function endpoints.has_place(address)
  local cap, load = settings.caps[address], load_of(address)
  return cap and is_pickable(load) and load < cap
end
-- Those of `among` that take one more, and those that would but for their own limit.
function endpoints.below_caps(among)
  local caps, free, closed = settings.caps, {}, {}
  for _, address in ipairs(among) do
    local load = load_of(address)
    if is_pickable(load) then
      local found = load < (caps[address] or UNPICKABLE) and free or closed
      found[#found + 1] = address
    end
  end
  return free, closed
end
-- Those on which r's flow is below its limit; and whether there is one but for that.
local function below_limit(r, among)
  local able, fields, free = {}, {}, {}
  for _, address in ipairs(among) do
    if is_pickable(load_of(address)) then
      able[#able + 1] = address
      fields[#fields + 1] = joined(r.flow, address)
    end
  end
  if #able == 0 then return free, false end
  for i, count in ipairs(flow_counts(fields)) do
    if count < r.limit then free[#free + 1] = able[i] end
  end
  return free, true
end
-- What an endpoint has against it, where scores are known: what its score lacks once live load has its part.
local function burden_of(among, scores)
  local most = 1
  for _, address in ipairs(among) do
    local load = load_of(address)
    if is_pickable(load) then most = math.max(most, load) end
  end
  return function(address) return settings.live_weight * load_of(address) / most - (scores[address] or 0) end
end
-- What the choice was made from, in as few bytes as can be: the loads of those that were named, in the order
-- in which they were, empty where an endpoint could not have it; where none were named, of those chosen.
local told, load_texts = {}, {} -- kept from call to call: to write the same numbers anew costs five times as much
local function load_text(load)
  if not is_pickable(load) then return '' end
  local text = load_texts[load]
  if not text then
    text = string.format('%d', load)
    if load < 1000 then load_texts[load] = text end
  end
  return text
end
local function loads_seen(named, among, chosen, kept)
  if not named then
    local texts, known_texts = told, load_texts
    for i = 1, kept do texts[i] = known_texts[chosen[i]] or load_text(chosen[i]) end
    return table.concat(texts, ',', 1, kept)
  end
  local free
  if among ~= named then
    free = {}
    for _, address in ipairs(among) do free[address] = true end
  end
  local count = #named
  for i = 1, count do
    local address = named[i]
    told[i] = (not free or free[address]) and load_text(loads[address]) or ''
  end
  return table.concat(told, ',', 1, count)
end
-- Best first; equals take turns by `turn`. `candidates` is '*' (all), 'a,b,c' (the least loaded of them) or
-- 'a=0.7,b=0.5' (scores without live load); `picks` is how many requests this call may still place. Returns
-- 'a,b,c' with up to `fallbacks` more than one, the loads that were seen, and the first; or nil, whether it is
-- only a limit that stands in the way, and the endpoints of which it is their own.
local best_ones, their_burdens = {}, {} -- filled again by each choice
function endpoints.pick(r, candidates, turn, picks)
  local want, among, scores, named = settings.fallbacks + 1
  if candidates ~= '*' then
    named, scores = listed(candidates)
    among = named
  elseif r.limit > 0 or settings.caps then
    among = endpoints.everyone()
  else
    if not window or window_left < 1 then read_window(picks, want) end
    among, window_left = window, window_left - 1
  end
  local limited, closed = false, nil
  if r.limit > 0 then among, limited = below_limit(r, among) end
  if settings.caps then
    among, closed = endpoints.below_caps(among)
    limited = limited or #closed > 0
  end
  local burden_on = scores and burden_of(among, scores) -- without scores, its load
  -- Insertion into the few best so far; a later equal stays behind.
  local best, burdens, kept, count = best_ones, their_burdens, 0, #among
  local next_one = turn % count
  for _ = 1, count do
    local address = among[next_one + 1]
    next_one = (next_one + 1) % count
    local load = loads[address] or load_of(address)
    local burden = burden_on and burden_on(address) or load
    if (kept < want or burden < burdens[kept]) and load >= 0 and load < UNPICKABLE then
      if kept < want then kept = kept + 1 end
      local at = kept
      while at > 1 and burden < burdens[at - 1] do
        best[at], burdens[at] = best[at - 1], burdens[at - 1]
        at = at - 1
      end
      best[at], burdens[at] = address, burden
    end
  end
  if kept == 0 then return nil, limited, closed end
  return table.concat(best, ',', 1, kept), loads_seen(named, among, burdens, kept), best[1]
end
-- Why an endpoint that is published takes nothing new: drained by an operator, or down. Each mark has its time.
local MARKS = {'drained', 'down'}
function endpoints.is_marked(address)
  for _, what in ipairs(MARKS) do
    if redis.call('HEXISTS', key.marks, joined(what, address)) == 1 then return true end
  end
  return false
end
-- Set or take away a mark. Returns whether the endpoint is known.
function endpoints.mark(what, on, address)
  local about = redis.call('HGET', key.endpoints, address)
  if not about then return false end
  local before = endpoints.is_marked(address)
  if on then
    write_now('HSET', key.marks, joined(what, address), now_ms)
  else
    write_now('HDEL', key.marks, joined(what, address))
  end
  local after = endpoints.is_marked(address)
  if before == after then return true end
  local version = tonumber(redis.call('HGET', key.pool, 'marks_version') or 0) or 0
  write_now('HSET', key.pool, 'marks_version', version + 1)
  if endpoints.is_draining(about) then return true end
  set_load(address, load_of(address) + (after and UNPICKABLE or -UNPICKABLE))
  pool.ready = pool.ready + (after and -1 or 1)
  pool.bound()
  return true
end
-- The addresses that have a mark, as a set.
function endpoints.marked()
  local found = {}
  for _, mark in ipairs(redis.call('HKEYS', key.marks)) do
    local address = string.match(mark, '\31(.*)$')
    if address then found[address] = true else drop_stray('HDEL', key.marks, mark) end
  end
  return found
end
function endpoints.forget_marks(address)
  for _, what in ipairs(MARKS) do write_now('HDEL', key.marks, joined(what, address)) end
end
-- A mark `down` that nobody has confirmed for so long lapses: the next request tries the endpoint.
function endpoints.lapse(down_ms)
  local marks = redis.call('HGETALL', key.marks)
  for i = 1, #marks, 2 do
    local what, address = string.match(marks[i], '^(%l+)\31(.*)$')
    local since_ms = tonumber(marks[i + 1])
    if not since_ms or redis.call('HEXISTS', key.endpoints, address or '') == 0 then
      drop_stray('HDEL', key.marks, marks[i])
    elseif what == 'down' and now_ms - since_ms > down_ms then
      endpoints.mark('down', false, address)
    end
  end
end
-- A limited flow's requests in flight: all of them (granted and placed), and those on one endpoint.
-- What is granted will need a place too, so the total decides before any endpoint's count does.
function endpoints.flow_full(r)
  return r.limit > 0 and flow_counts({r.flow})[1] >= r.limit * pool.ready
end
function endpoints.count_flow(r, endpoint, difference)
  if r.limit == 0 then return end
  local field = endpoint and joined(r.flow, endpoint) or r.flow
  limit_counts[field], changed_limits[field] = flow_counts({field})[1] + difference, true
end
local scored_addresses = {} -- load, address, and so on: filled again by each call
function endpoints.save()
  local count = 0
  for address in pairs(changed_loads) do
    local load = loads[address]
    if load >= 0 then
      scored_addresses[count + 1], scored_addresses[count + 2] = load, address
      count = count + 2
    else
      redis.call('ZREM', key.load, address)
    end
  end
  write_all('ZADD', key.load, scored_addresses, count)
  for field in pairs(changed_limits) do
    local held = limit_counts[field]
    if held > 0 then redis.call('HSET', key.limits, field, held) else redis.call('HDEL', key.limits, field) end
  end
end
function endpoints.have_changed() return next(changed_loads) ~= nil end
local function forget_endpoints()
  endpoints.all = nil
  for address in pairs(changed_loads) do changed_loads[address] = nil end
  if next(limit_counts) then limit_counts, changed_limits = {}, {} end
  if not remembered or loads_known > MOST_LOADS then
    loads, loads_known, window = {}, 0, nil
  elseif window_left ~= math.huge then
    window = nil
  end
end
