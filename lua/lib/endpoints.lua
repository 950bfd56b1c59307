-- include: pool
-- The live load of every endpoint, and the choice among endpoints, for each stage. The table `endpoints` is the stage
-- decode, which generates answers; `prefill` is the stage prefill, which computes the prompts of split requests. The
-- load is the endpoint's number of requests (in `prefill`: prefills) in flight, plus UNPICKABLE if it takes no new
-- requests (draining, marked, or unpublished while requests still run). An endpoint of both stages has a load in each.
-- The hash `limits` counts the requests in flight of flows that have a limit per endpoint. The table `caps` of a stage
-- is endpoint -> limit, nil if no endpoint has a limit: the limits in the settings and, in `endpoints`, the temporary
-- limits of endpoints that are full or on trial (lib/marks.lua). An endpoint that the table lacks has the limit
-- `default_cap`, if set. Limits that the fleet finds in tokens are `settings.token_caps`, of the stage decode only;
-- then the hash `limits` has each endpoint's tokens in flight, that is, the stock that its requests have taken. An
-- endpoint below its limit accepts one more request, even one that exceeds the limit. This file uses reads and writes
-- from lib/storage.lua, settings from lib/pool.lua. This file defines `endpoints` and `prefill`.

-- A stage: `set` is the name of the sorted set with its loads; `caps_name` and `default_cap_name` are the settings with
-- its limits. `is_decode`: the limits may be in tokens. `described`: the function of a stage to share.
local function new_stage(name, set, caps_name, default_cap_name, described)
  local is_decode = name == 'decode'
  -- ANY: `candidates` of a request that accepts any endpoint
  -- counts_flows: whether this library has seen a flow's limit per endpoint
  -- in_use: whether the stage has cached or changed a load
  local stage = {ANY = '*', counts_flows = false, in_use = false}
  -- endpoint -> load, as far as known. The loads are cached between calls while only this library changes the pool.
  local loads, loads_known = {}, 0
  local MOST_LOADS = 1000 -- most loads in the cache, since requests may name any number of unknown endpoints
  local changed_loads = {}
  local all_counted -- the list that the function `counted` has returned in this script call
  local takes_suffice -- whether the stock is at least the number of requests in flight; nil: not compared in this call
  local window, window_left -- the least loaded endpoints, and the number of choices for which they suffice
  local READ_AT_ONCE = 2000 -- most values for one unpack(), which puts them on a stack of limited depth
  local SMALL = 8 -- fewest endpoints to read; a window with fewer endpoints has them all, and so never runs out
  -- Replaces SMALL if endpoints have limits: the window is ordered by load, but the choice compares load / limit.
  local SMALL_WITH_CAPS = 16

  -- Return a function that caches the results of `make`, a function with one text argument.
  local function memoized(make)
    local results, known = {}, 0
    return function(text)
      local result = results[text]
      if result == nil then
        if known >= 1000 then results, known = {}, 0 end
        result = make(text)
        results[text], known = result, known + 1
      end
      return result
    end
  end

  -- Return the parts of an endpoint's JSON description that scripts use. An endpoint without `stages` only decodes.
  stage.described = described or memoized(function(description)
    local it = cjson.decode(description)
    local stages = it.stages or 'decode'
    return {draining = it.draining == true,
      decode = string.find(stages, 'decode', 1, true) ~= nil, prefill = string.find(stages, 'prefill', 1, true) ~= nil}
  end)

  -- Return the first endpoint of a list 'a,b,c'.
  stage.first = memoized(function(list) return string.match(list, '^[^,]*') end)

  -- Read the loads of the first `named` addresses with one command.
  local asked_addresses = {} -- kept from call to call, since creating a table is slow
  function stage.prefetch(addresses, named)
    local asked, count = asked_addresses, 0
    for i = 1, named do
      local address = addresses[i]
      if loads[address] == nil then
        count = count + 1
        asked[count], loads[address] = address, false
      end
    end
    loads_known, stage.in_use = loads_known + count, true
    for first = 1, count, READ_AT_ONCE do
      local last = math.min(first + READ_AT_ONCE - 1, count)
      local scores = redis.call('ZMSCORE', key[set], unpack(asked, first, last))
      for i = first, last do loads[asked[i]] = tonumber(scores[i - first + 1] or -1) end -- -1: not listed
    end
  end

  local function load_of(address)
    if not loads[address] then
      loads[address] = tonumber(redis.call('ZSCORE', key[set], address) or -1) -- -1: not listed
      loads_known, stage.in_use = loads_known + 1, true
    end
    return loads[address]
  end
  stage.load = load_of

  -- Return the number of requests in flight on an endpoint, whether or not the endpoint takes new requests.
  function stage.in_flight(address)
    local load = load_of(address)
    return load >= UNPICKABLE and load - UNPICKABLE or math.max(load, 0)
  end

  -- Field of the hash `limits` -> requests in flight of a limited flow, or tokens in flight on an endpoint, cached
  -- during a call; and the fields that the call has changed.
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

  -- Return the tokens in flight on each endpoint of the list `among`. Call this function only if limits are in tokens.
  function stage.amounts(among)
    local fields = {}
    for i, address in ipairs(among) do fields[i] = joined('', address) end
    return flow_counts(fields)
  end

  -- Add to an endpoint's tokens in flight; `is_idle`: its last request has ended, so drop the rounding error.
  function stage.add_amount(address, difference, is_idle)
    local field = joined('', address)
    limit_counts[field], changed_limits[field] = is_idle and 0 or flow_counts({field})[1] + difference, true
  end

  -- Return whether an endpoint is published, or was published before and still runs requests.
  function stage.is_known(address) return load_of(address) >= 0 end

  -- Set the load of an endpoint that begins or ceases to take new requests, which makes `window` out of date.
  function stage.set_load(address, load)
    loads[address], changed_loads[address] = load, true
    window, all_counted = nil, nil
  end

  function stage.reserve(address, taken)
    local load = loads[address] or load_of(address)
    if load < 0 then all_counted = nil end
    loads[address], changed_loads[address] = load < 0 and UNPICKABLE + 1 or load + 1, true
    if is_decode and settings.token_caps then stage.add_amount(address, taken) end
  end

  function stage.release(address, taken)
    local load = loads[address] or load_of(address)
    if load <= 0 or load == UNPICKABLE then return end
    load = load - 1
    if is_decode and settings.token_caps then stage.add_amount(address, -taken, load == 0 or load == UNPICKABLE) end
    if load == UNPICKABLE and not stage.lists(address) then load = -1 end
    loads[address], changed_loads[address] = load, true
  end

  function stage.is_draining(description) return stage.described(description).draining end
  -- Return whether an endpoint's JSON description lists this stage.
  function stage.includes(description) return stage.described(description)[name] end

  -- Return whether this stage counts a published endpoint. The stage decode also counts endpoints that only prefill,
  -- with a load from UNPICKABLE on, so that `is_known` finds each published endpoint there.
  function stage.lists(address)
    local description = read('HGET', key.endpoints, address)
    return description and (is_decode or stage.includes(description))
  end

  local function is_pickable(load) return load >= 0 and load < UNPICKABLE end
  local function is_less_loaded(a, b) return loads[a] < loads[b] end

  -- Read the `picks` + `want` least loaded endpoints into the table `window`: enough for `picks` requests that need
  -- `want` endpoints each. Redis still has the former loads of endpoints that this call has changed: sort these
  -- endpoints in by their new loads.
  local function read_window(picks, want)
    local small = stage.caps and SMALL_WITH_CAPS or SMALL
    local most = math.max(math.max(picks, 1) + want, small)
    local changed, changed_count, own = changed_loads, 0, {}
    for address in pairs(changed) do
      changed_count = changed_count + 1
      if is_pickable(loads[address]) then own[#own + 1] = address end
    end
    table.sort(own, is_less_loaded)
    local listed, count, next_own = redis.call('ZRANGE', key[set], 0, most + changed_count - 1, 'WITHSCORES'), 0, 1
    window = {}
    for i = 1, #listed, 2 do
      local address = listed[i]
      if not changed[address] then
        local load = loads[address] or tonumber(listed[i + 1])
        loads[address] = load
        while own[next_own] and loads[own[next_own]] < load do
          count = count + 1
          window[count], next_own = own[next_own], next_own + 1
        end
        count = count + 1
        window[count] = address
        if count >= most then break end
      end
    end
    for i = next_own, count < most and #own or 0 do
      count = count + 1
      window[count] = own[i]
    end
    stage.in_use = true
    loads_known, window_left = loads_known + count, count < small and math.huge or most - want
  end

  -- Parse `candidates`: return the addresses, at most 1000, and address -> score (nil without scores).
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
    stage.prefetch(found, #found)
    return found, scores
  end

  -- Return whether an endpoint takes new requests: it is published, not draining and not marked.
  function stage.is_ready(address) return is_pickable(load_of(address)) end

  -- Return all endpoints in the sorted set `load`, with or without requests in flight. A call reads the set only once.
  function stage.counted()
    if all_counted then return all_counted end
    local all, listed_ones = redis.call('ZRANGE', key[set], 0, -1), {}
    local count = #all
    for i = 1, count do listed_ones[all[i]] = true end
    for address in pairs(changed_loads) do
      if not listed_ones[address] then
        count = count + 1
        all[count] = address
      end
    end
    stage.prefetch(all, count)
    all_counted = all
    return all
  end

  -- Return the limit of an endpoint; nil if it has no limit. Call this function only if endpoints have limits.
  function stage.cap(address) return stage.caps[address] or settings[default_cap_name] end

  function stage.token_cap(address) return settings.token_caps[address] or settings.default_token_cap end

  -- Return whether an endpoint whose load is known is at a limit. Call this function only if endpoints have limits.
  local function is_full(address)
    local cap = stage.caps[address] or settings[default_cap_name]
    if cap and loads[address] >= cap then return true end
    return is_decode and settings.token_caps and stage.amounts({address})[1] + RESIDUE >= stage.token_cap(address)
  end

  -- Return whether some endpoint surely has a free slot while the stock is below its upper bound: the bound is the sum
  -- of the ready endpoints' limits (`adaptive`), no temporary limit is lower, and each request in flight has taken at
  -- least 1 of the stock. Requests that arrived while the queue was disabled have taken no stock, so compare stock and
  -- load, once a call. If limits are in tokens, this holds only if no endpoint also has a limit in requests.
  function stage.stock_bounds_slots()
    if settings.adaptive ~= 1 or stage.caps ~= settings[caps_name] or settings.queue_enabled == 0 then return false end
    if is_decode and settings.token_caps then return next(stage.caps) == nil and pool.upper > 0 end
    if takes_suffice == nil then takes_suffice = pool.stock >= read('ZCARD', key.inflight) end
    return takes_suffice and pool.upper > 0
  end

  -- Return how many tokens of an endpoint's limit one more request will take on average.
  local function mean_taken(running) return math.max(pool.stock / math.max(running, 1), 1) end

  -- Return how many more requests an endpoint accepts or, if `amount` (its tokens in flight) is given, how many more
  -- tokens; infinite if the endpoint has no limit.
  local function room_on(address, amount, mean)
    local load = loads[address] or load_of(address)
    if not is_pickable(load) then return 0 end
    local left = (stage.caps and stage.cap(address) or math.huge) - load
    if amount then left = math.min(left * mean, stage.token_cap(address) - amount) end
    return math.max(left, 0)
  end

  -- Return how many more requests an endpoint accepts; infinite if the endpoint has no limit.
  function stage.slots(address)
    if not (is_decode and settings.token_caps) then return math.ceil(room_on(address)) end
    local mean = mean_taken(read('ZCARD', key.inflight))
    return math.ceil((room_on(address, stage.amounts({address})[1], mean) - RESIDUE) / mean)
  end

  -- Return how many more requests, or tokens under `token_caps`, may be granted before every ready endpoint is at its
  -- limit. A granted request that is not placed yet also takes a slot. Callable only if endpoints have limits.
  function stage.free_slots()
    local left, placed, granted = 0, 0, read('ZCARD', key.inflight)
    local amounts = is_decode and settings.token_caps and stage.amounts(stage.counted())
    local mean = mean_taken(granted)
    for i, address in ipairs(stage.counted()) do
      placed = placed + (amounts and amounts[i] or stage.in_flight(address))
      left = left + room_on(address, amounts and amounts[i], mean)
    end
    return left - ((amounts and pool.stock or granted) - placed)
  end

  -- Return the ready endpoints of `among` in two lists: below their limit, and at their limit.
  function stage.split_by_limit(among)
    local free, closed = {}, {}
    for _, address in ipairs(among) do
      if is_pickable(load_of(address)) then
        local found = is_full(address) and closed or free
        found[#found + 1] = address
      end
    end
    return free, closed
  end

  -- Return the ready endpoints of `among` where r's flow is below its limit, and whether any of `among` is ready.
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

  -- Return the cost function for candidates with scores: live_weight * load / highest load - score. The endpoint with
  -- the lowest cost is chosen.
  local function cost_function(among, scores)
    local most = 1
    for _, address in ipairs(among) do
      local load = load_of(address)
      if is_pickable(load) then most = math.max(most, load) end
    end
    return function(address) return settings.live_weight * load_of(address) / most - (scores[address] or 0) end
  end

  -- The loads on which a choice was based, joined by commas: the loads of the named candidates in their order ('' if
  -- not eligible) or, without named candidates, the loads of the chosen endpoints.
  local load_fields, load_texts = {}, {} -- kept between calls: formatting costs five times a lookup
  local function load_text(load)
    if not is_pickable(load) then return '' end
    local text = load_texts[load]
    if not text then
      text = string.format('%d', load)
      if load < 1000 then load_texts[load] = text end
    end
    return text
  end

  local function loads_seen(named, eligible, chosen, kept)
    if not named then
      for i = 1, kept do load_fields[i] = load_text(loads[chosen[i]]) end
      return table.concat(load_fields, ',', 1, kept)
    end
    local free
    if eligible ~= named then
      free = {}
      for _, address in ipairs(eligible) do free[address] = true end
    end
    local count = #named
    for i = 1, count do
      local address = named[i]
      load_fields[i] = (not free or free[address]) and load_text(loads[address]) or ''
    end
    return table.concat(load_fields, ',', 1, count)
  end

  -- Enter the `want` best ready endpoints of `among` in `best_ones` and `their_costs`, and return their number.
  -- Endpoints of equal cost keep the order in which they are visited, which `turn` rotates. If the fleet finds limits,
  -- loads are compared relative to the limits (lib/settings.lua: to `compared_caps`), and endpoints at their limit come
  -- last: as a fallback such an endpoint is better than an error.
  local AT_LIMIT = 1e6 -- added to the cost of an endpoint at its limit; exceeds the difference of any two costs
  local compared_caps_name, NO_CAPS = 'compared_' .. caps_name, {}
  local best_ones, their_costs = {}, {} -- reused by each choice
  local function rank(among, want, turn, cost_of)
    local best, costs, kept, count = best_ones, their_costs, 0, #among
    local default_cap = settings[default_cap_name]
    local caps = settings.adaptive == 1 and (is_decode or default_cap) and stage.caps
    local compared_caps = settings[compared_caps_name] or NO_CAPS
    local amounts = is_decode and settings.token_caps and stage.amounts(among)
    local next_one = turn % count
    for _ = 1, count do
      local address, amount = among[next_one + 1], amounts and amounts[next_one + 1]
      next_one = (next_one + 1) % count
      local load = loads[address] or load_of(address)
      if load >= 0 and load < UNPICKABLE then
        local cost = cost_of and cost_of(address) or load
        if caps then
          local cap = amount and stage.token_cap(address) or caps[address] or default_cap
          local compared = compared_caps[address] or cap
          if not cost_of and cap > 0 then cost = (amount or load) / compared end -- cap 0: the endpoint refuses all
          if amount and is_full(address) or not amount and load >= cap then cost = cost + AT_LIMIT end
        end
        if kept < want or cost < costs[kept] then
          if kept < want then kept = kept + 1 end
          local at = kept
          while at > 1 and cost < costs[at - 1] do
            best[at], costs[at] = best[at - 1], costs[at - 1]
            at = at - 1
          end
          best[at], costs[at] = address, cost
        end
      end
    end
    return kept
  end

  -- Choose endpoints for r, the best first; `turn` rotates among endpoints of equal cost. `candidates` is '*' (all),
  -- 'a,b,c' (choose by load) or 'a=0.7,b=0.5' (scores, which do not include live load). `picks` is how many requests
  -- this call may still place. Return 'a,b,c' (the endpoint and up to `fallbacks` fallbacks), the loads seen, and the
  -- endpoint; or nil, whether only a limit prevents a choice, and the endpoints that are at their own limit.
  function stage.choose(r, candidates, turn, picks)
    local want, among, scores, named = settings.fallbacks + 1
    local finds_limits = settings.adaptive == 1 and (is_decode or settings[default_cap_name])
    if candidates ~= stage.ANY then
      named, scores = listed(candidates)
      among = named
    elseif r.limit > 0 or stage.caps and not finds_limits then
      among = stage.counted()
    else
      if not window or window_left < 1 then read_window(picks, want) end
      among, window_left = window, window_left - 1
    end
    local limited, closed = false, nil
    if r.limit > 0 then among, limited = below_limit(r, among) end
    local eligible = among
    if stage.caps and (named or not finds_limits) then
      eligible, closed = stage.split_by_limit(among)
      limited = limited or #closed > 0
      if not finds_limits then among = eligible end
    end
    local cost_of = scores and cost_function(among, scores) -- nil: by load alone
    local kept = rank(among, want, turn, cost_of)
    if finds_limits and kept > 0 and is_full(best_ones[1]) then
      if among == window and window_left ~= math.huge then -- an endpoint with more load may have room
        among = stage.counted()
        kept = rank(among, want, turn)
      end
      if is_full(best_ones[1]) then
        kept, limited, closed = 0, true, closed or select(2, stage.split_by_limit(among))
      end
    end
    if kept == 0 then return nil, limited, closed end
    return table.concat(best_ones, ',', 1, kept), loads_seen(named, eligible, best_ones, kept), best_ones[1]
  end

  -- Choose like `stage.choose`; but if no named candidate takes new requests, and no limit is the cause, choose among
  -- the candidates that only an ejection excludes.
  function stage.pick(r, candidates, turn, picks)
    local picked, seen, first = stage.choose(r, candidates, turn, picks)
    if picked or seen or candidates == stage.ANY or pool.outliers == 0 then return picked, seen, first end
    local tried = {}
    for _, address in ipairs(listed(candidates)) do
      local description = stage.has_mark('ejected', address) and read('HGET', key.endpoints, address)
      local is_out = stage.has_mark('down', address) or stage.has_mark('drained', address)
      if description and not is_out and not stage.is_draining(description) then tried[#tried + 1] = address end
    end
    for _, address in ipairs(tried) do loads[address] = loads[address] - UNPICKABLE end
    picked, seen, first = stage.choose(r, candidates, turn, picks)
    for _, address in ipairs(tried) do loads[address] = loads[address] + UNPICKABLE end
    return picked, seen, first
  end

  function stage.has_mark(what, address) return read('HEXISTS', key.marks, joined(what, address)) == 1 end
  function stage.is_ejected(address) return stage.has_mark('ejected', address) end

  -- Return whether r's flow has as many requests in flight as its limit allows on all ready endpoints together. The
  -- total count of a flow includes granted requests, which are not placed yet; the counts per endpoint do not.
  function stage.flow_at_limit(r)
    return r.limit > 0 and flow_counts({r.flow})[1] >= r.limit * pool.ready
  end

  function stage.count_flow(r, endpoint, difference)
    if r.limit == 0 then return end
    local field = endpoint and joined(r.flow, endpoint) or r.flow
    stage.counts_flows = true
    limit_counts[field], changed_limits[field] = flow_counts({field})[1] + difference, true
  end

  local scored_addresses = {} -- load, address, load, address ...; reused by each call
  function stage.commit()
    local count = 0
    for address in pairs(changed_loads) do
      local load = loads[address]
      if load >= 0 then
        scored_addresses[count + 1], scored_addresses[count + 2] = load, address
        count = count + 2
      else
        redis.call('ZREM', key[set], address)
      end
    end
    write_values('ZADD', key[set], scored_addresses, count)
    for field in pairs(changed_limits) do
      local running = limit_counts[field]
      if running > 0 then redis.call('HSET', key.limits, field, running) else redis.call('HDEL', key.limits, field) end
    end
  end

  function stage.have_changed() return next(changed_loads) ~= nil end
  function stage.reset()
    all_counted, takes_suffice = nil, nil
    for address in pairs(changed_loads) do changed_loads[address] = nil end
    if next(limit_counts) then limit_counts, changed_limits = {}, {} end
    if not cache_is_valid or loads_known > MOST_LOADS then
      loads, loads_known, window, stage.in_use = {}, 0, nil, false
    elseif window_left ~= math.huge then
      window = nil
    end
  end
  return stage
end

local endpoints = new_stage('decode', 'load', 'caps', 'default_cap')
local prefill = new_stage('prefill', 'prefill_load', 'prefill_caps', 'default_prefill_cap', endpoints.described)
