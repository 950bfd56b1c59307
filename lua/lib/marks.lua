-- include: endpoints
-- Marks of endpoints. Decides which endpoints take new requests: those that are published, not draining, and without
-- the marks `drained` (by an operator), `down` and `ejected` (lib/outliers.lua). This file also computes the limits of
-- failing or full endpoints, and the bounds of the stock. This file uses loads and outlier entries from
-- lib/endpoints.lua, counters from lib/pool.lua. This file defines `marks`.

local marks = {}
do
  local MARKS = {'drained', 'down', 'ejected'}

  -- Enter a published endpoint in the loads of a stage; its requests in flight stay counted.
  local function add_published(stage, address, draining)
    local load, count = stage.load(address), stage.in_flight(address)
    local listed_load = draining and count + UNPICKABLE or count
    if listed_load ~= load then stage.set_load(address, listed_load) end
  end

  -- Stop new requests to an endpoint that is no longer published in a stage; the stage forgets the endpoint when its
  -- last request ends.
  function marks.unpublish(stage, address)
    local load = stage.load(address)
    if load <= 0 or load == UNPICKABLE then
      if load >= 0 then stage.set_load(address, -1) end
    elseif load < UNPICKABLE then
      stage.set_load(address, load + UNPICKABLE)
    end
  end

  -- Add `change` to the number of published endpoints that prefill and, if this endpoint does not decode, to the number
  -- of endpoints that only prefill (draining ones too).
  function marks.count_stages(described, change)
    if described.prefill then pool.prefillers = pool.prefillers + change end
    if not described.decode then pool.prefill_only = pool.prefill_only + change end
  end

  function marks.is_marked(address)
    for _, what in ipairs(MARKS) do
      if endpoints.has_mark(what, address) then return true end
    end
    return false
  end

  -- Set or remove a mark. Return whether the endpoint is published.
  function marks.set(what, on, address)
    local description = read('HGET', key.endpoints, address)
    if not description then return false end
    local had, before = endpoints.has_mark(what, address), marks.is_marked(address)
    if on then
      defer_write('HSET', key.marks, joined(what, address), now_ms)
    else
      defer_write('HDEL', key.marks, joined(what, address))
    end
    if had == on then return true end
    pool.create()
    local version = tonumber(read('HGET', key.pool, 'marks_version') or 0) or 0
    defer_write('HSET', key.pool, 'marks_version', version + 1)
    local after = marks.is_marked(address)
    if before == after or endpoints.is_draining(description) then return true end
    for _, stage in ipairs({endpoints, prefill}) do
      if stage.includes(description) then
        stage.set_load(address, stage.load(address) + (after and UNPICKABLE or -UNPICKABLE))
      end
    end
    if not endpoints.includes(description) then return true end
    pool.ready = pool.ready + (after and -1 or 1)
    marks.try_ejected()
    marks.update_bounds()
    return true
  end

  -- If no endpoint is ready, end all ejections.
  function marks.try_ejected()
    if pool.ready > 0 or pool.outliers == 0 then return end
    for address in pairs(endpoints.outliers) do
      if endpoints.is_ejected(address) then marks.set('ejected', false, address) end
    end
  end

  -- Return the addresses of marked endpoints, as a set.
  function marks.all()
    local found = {}
    for _, mark in ipairs(read('HKEYS', key.marks)) do
      local address = string.match(mark, '\31(.*)$')
      if address then found[address] = true else drop_stray('HDEL', key.marks, mark) end
    end
    return found
  end

  -- Publish an endpoint with its JSON description; '' unpublishes the endpoint. `former`: the description published so
  -- far, or nil; `marked`: the addresses of marked endpoints. Return whether the endpoint takes new requests.
  function marks.publish(address, description, former, marked)
    if description == '' then
      defer_write('HDEL', key.endpoints, address)
      for _, what in ipairs(MARKS) do defer_write('HDEL', key.marks, joined(what, address)) end
      marks.forget_outlier(address)
      marks.unpublish(endpoints, address)
      if former and prefill.includes(former) then marks.unpublish(prefill, address) end
      return false
    end
    if description ~= former then defer_write('HSET', key.endpoints, address, description) end
    local closed = endpoints.is_draining(description) or marked[address]
    add_published(endpoints, address, closed or not endpoints.includes(description))
    if prefill.includes(description) then
      add_published(prefill, address, closed)
    elseif former and former ~= description and prefill.includes(former) then
      marks.unpublish(prefill, address)
    end
    return endpoints.is_ready(address)
  end

  -- Remove marks of unpublished endpoints, and `down` marks that no replica has confirmed for `down_ms`.
  function marks.expire(down_ms)
    local found = read('HGETALL', key.marks)
    for i = 1, #found, 2 do
      local what, address = string.match(found[i], '^(%l+)\31(.*)$')
      local since_ms = tonumber(found[i + 1])
      if not since_ms or read('HEXISTS', key.endpoints, address or '') == 0 then
        drop_stray('HDEL', key.marks, found[i])
      elseif what == 'ejected' and not endpoints.outliers[address] then
        marks.set('ejected', false, address) -- the endpoint's entry in `outliers` was lost
      elseif what == 'down' and now_ms - since_ms > down_ms then
        marks.set('down', false, address)
      end
    end
  end

  -- Read the entry of each failing or full endpoint from the hash `outliers` (lib/outliers.lua).
  function marks.read_outliers()
    local found = redis.call('HGETALL', key.outliers)
    for i = 1, #found, 2 do
      local known, entry = pcall(cjson.decode, found[i + 1])
      if known and type(entry) == 'table' and type(entry.by) == 'table' then endpoints.outliers[found[i]] = entry end
    end
    marks.update_caps()
  end

  function marks.forget_outlier(address)
    if not endpoints.outliers[address] then return end
    endpoints.outliers[address], pool.outliers = nil, pool.outliers - 1
    pool.touched = true
    defer_write('HDEL', key.outliers, address)
  end

  function marks.update_caps()
    endpoints.caps, prefill.caps = settings.caps, settings.prefill_caps
    for address, entry in pairs(endpoints.outliers) do
      local is_over = entry.cap and entry.cap_until <= now_ms
      if entry.cap and (not is_over or entry.fulls) then
        if endpoints.caps == settings.caps then
          endpoints.caps = {}
          for each, cap in pairs(settings.caps or {}) do endpoints.caps[each] = cap end
        end
        local cap = is_over and entry.cap + 1 or entry.cap -- one request tries an endpoint that was full
        endpoints.caps[address] = math.min(cap, endpoints.cap(address) or cap)
      end
    end
  end

  -- Compute the bounds of the stock. If `adaptive`, both bounds are the sum of the ready endpoints' limits, else both
  -- are configured per ready endpoint. Nine digits undo binary rounding: 20 times 1.15 is 23, not 22.999...
  function marks.update_bounds()
    local caps, default_cap = settings.token_caps or settings.caps, settings.default_token_cap or settings.default_cap
    local function scaled(bound) return tonumber(string.format('%.9g', bound * pool.ready)) end
    if settings.adaptive == 1 then
      pool.upper = 0
      for _, address in ipairs(endpoints.counted()) do
        if endpoints.is_ready(address) then
          pool.upper = pool.upper + (caps[address] or default_cap)
        end
      end
      pool.lower = pool.upper
    else
      pool.upper, pool.lower = scaled(settings.upper_per), scaled(settings.lower_per)
    end
    pool.lower = math.max(pool.lower, 1e-9) -- with a bound of 0, an idle pool still starts one request
  end

  -- The upper bound that the stock would have if all published endpoints were ready. A restored request takes stock up
  -- to this bound.
  function marks.largest_bound()
    return math.max(pool.upper, settings.upper_per * math.max(read('HLEN', key.endpoints) - pool.prefill_only, 1))
  end
end
