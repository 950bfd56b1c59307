-- include: dispatch
-- Outlier ejection: for some time the whole fleet sends no new request to a failing endpoint. A full endpoint, which
-- answers 429, or 503 while it works on other requests, is limited for some time to its requests in flight. This file
-- uses loads from lib/endpoints.lua, marks and limits from lib/marks.lua, records from lib/registry.lua. This file
-- defines `outliers` for the functions that report failures and answers, and for the sweep.
--
-- An entry of the hash `outliers` is JSON for one endpoint. by: {id, flow} of each failure since the endpoint's last
-- answer, oldest first, flow '' if the request also failed on another endpoint; elsewhere: 1 once another endpoint has
-- since answered one of these flows; at, why: time and reason of the last fault; times: number of ejections in a row;
-- until_ms: end of the last ejection; seen_ms: when a probe last failed; trial: 1 while one request tries the endpoint;
-- returned_ms: when the trial passed; cap, cap_until: limit of the endpoint's requests in flight, and when the limit
-- ends; fulls: how often in a row the endpoint was full; stuck_ms, stuck_ended: since when the metrics page is
-- unchanged, and pool.ended at that time.

local outliers = {}
do
  local MOST_FAILURES = 8 -- most failures that an endpoint's entry in `outliers` keeps
  -- With one flow in flight, so many failures in a row eject an endpoint, once another endpoint has answered the flow.
  local MOST_ALONE = 5
  local LOOKED_AT = 32 -- most requests in flight that the function has_pool_alone reads
  -- A trial passes if its request is answered or has not failed for this long (second value: after `stuck`).
  local TRIAL_MS, STUCK_TRIAL_MS = 15000, 3600000
  local FULL_MS, LEAST_FULL_MS, MOST_FULL_MS = 1000, 100, 60000 -- how long `full` lasts: default, least, most
  local STUCK_MS = 10000 -- eject an endpoint whose metrics page is unchanged for this long while requests end
  local UNSEEN_MS = 10000 -- without probes an ejection ends this long after until_ms and the last failed probe
  local KEPT_MS = 60000 -- how long to keep an entry that neither ejects nor limits its endpoint

  local function is_on() return (settings.eject_ms or 0) > 0 end

  local function put(address, entry)
    if not endpoints.outliers[address] then
      endpoints.outliers[address], pool.outliers = entry, pool.outliers + 1
    end
    pool.touched = true
    defer_write('HSET', key.outliers, address, cjson.encode(entry))
    marks.update_caps()
  end

  local function entry_of(address) return endpoints.outliers[address] or {by = {}, times = 0, at = now_ms, why = ''} end

  local function drop(address)
    marks.forget_outlier(address)
    marks.update_caps()
  end

  -- Return whether every request in flight belongs to `flow`. The function checks only the LOOKED_AT requests with the
  -- latest leases.
  local function has_pool_alone(flow)
    local ids = read('ZREVRANGE', key.inflight, 0, LOOKED_AT - 1)
    record.prefetch(ids, #ids)
    for _, id in ipairs(ids) do
      local r = record.read(id)
      if r and r.flow ~= flow then return false end
    end
    return true
  end

  -- Return whether an endpoint's failures justify an ejection: two flows had failures, so that no single client can
  -- eject an endpoint; or the only flow in flight had MOST_ALONE failures, and another endpoint has answered that flow.
  local function is_failing(entry)
    local first, count
    for _, failure in ipairs(entry.by) do
      local flow = failure[2]
      if flow ~= '' then
        if first and flow ~= first then return true end
        first, count = flow, (count or 0) + 1
      end
    end
    return first and count >= MOST_ALONE and entry.elsewhere and has_pool_alone(first)
  end

  local function has_failed(entry, flow)
    for _, failure in ipairs(entry.by) do
      if failure[2] == flow then return true end
    end
  end

  local function is_limited(entry) return entry.cap and entry.cap_until > now_ms end

  -- Eject an endpoint. At most eject_percent of the endpoints may be ejected, and never the last ready endpoint.
  local function eject(address, entry, why)
    local ejected = 0
    for each in pairs(endpoints.outliers) do
      if endpoints.is_ejected(each) then ejected = ejected + 1 end
    end
    local most = math.floor((pool.ready + ejected) * settings.eject_percent / 100)
    if pool.ready < 2 or ejected >= most or not endpoints.is_ready(address) then return end
    local goes_on = entry.trial or now_ms - (entry.returned_ms or 0) < settings.eject_most_ms
    entry.times = goes_on and entry.times + 1 or 1
    entry.until_ms = now_ms + math.min(settings.eject_ms * 2 ^ math.min(entry.times - 1, 30), settings.eject_most_ms)
    entry.why, entry.seen_ms, entry.trial, entry.cap, entry.stuck_ms, entry.fulls = why, nil, nil, nil, nil, nil
    put(address, entry)
    marks.set('ejected', true, address)
    return true
  end

  -- End an ejection and begin a trial: one request tries the endpoint.
  local function try(address, entry)
    entry.trial, entry.cap = 1, endpoints.in_flight(address) + 1
    entry.cap_until = now_ms + (entry.why == 'stuck' and STUCK_TRIAL_MS or TRIAL_MS)
    put(address, entry)
    marks.set('ejected', false, address)
  end

  -- Count the failure of a request on an endpoint only once. A request that fails on two endpoints counts against
  -- neither, since the request itself may crash engines. Some engines answer 503 when they are full: an endpoint that
  -- works on other requests is limited then, not ejected. `mine` is 1 if the failed request still counts among the
  -- endpoint's requests in flight, else 0. Return whether this failure has ejected the endpoint.
  function outliers.failed(address, id, flow, why, mine)
    if not (is_on() and endpoints.is_known(address)) then return end
    for other, entry in pairs(endpoints.outliers) do
      for _, failure in ipairs(entry.by) do
        if failure[1] == id then
          if other == address or failure[2] == '' then return end
          failure[2] = ''
          put(other, entry)
          if endpoints.is_ejected(other) and entry.why ~= 'stuck' and not is_failing(entry) then
            entry.times = math.max(entry.times - 1, 0)
            put(other, entry)
            marks.set('ejected', false, other)
          end
          return
        end
      end
    end
    local entry = entry_of(address)
    if not endpoints.is_ready(address) then return end -- the request was placed before the endpoint was closed
    -- A full endpoint refuses requests, which others then serve; reports of the two may come in either order.
    if why == 'retried' and not entry.trial and (entry.fulls or is_limited(entry)) then return end
    table.insert(entry.by, {id, flow})
    if #entry.by > MOST_FAILURES then
      local at = 1 -- drop the oldest failure of this flow or of no flow; else the oldest
      for i = #entry.by - 1, 1, -1 do
        if entry.by[i][2] == '' or entry.by[i][2] == flow then at = i end
      end
      table.remove(entry.by, at)
    end
    entry.at, entry.why = now_ms, why
    put(address, entry)
    if not is_failing(entry) then return end
    if why ~= '503' or entry.trial or endpoints.in_flight(address) - mine < 1 then return eject(address, entry, why) end
    outliers.full(address, mine, 0)
  end

  -- Record that an endpoint has answered a request of `flow` well. If the endpoint is on trial, its trial has passed.
  function outliers.answered(address, flow)
    for other, entry in pairs(endpoints.outliers) do
      if other ~= address and not entry.elsewhere and has_failed(entry, flow) then
        entry.elsewhere = 1
        put(other, entry)
      end
    end
    local entry = endpoints.outliers[address]
    if not entry or endpoints.is_ejected(address) then return end
    if entry.trial then entry.trial, entry.cap, entry.returned_ms = nil, nil, now_ms end
    if entry.cap and entry.cap_until <= now_ms then entry.cap = nil end
    entry.by, entry.elsewhere, entry.stuck_ms, entry.fulls = {}, nil, nil, nil
    local says_nothing = entry.times == 0 and not entry.cap
    if says_nothing then drop(address) else put(address, entry) end
  end

  -- Limit the requests in flight of a full endpoint for `hold_ms` (0: unknown) to the present number, less `mine`, the
  -- refused requests that are still counted there. After `hold_ms` the limit grows by one as a test. `hold_ms` doubles
  -- each time the endpoint is full again before it answers a request.
  function outliers.full(address, mine, hold_ms)
    if not (is_on() and endpoints.is_known(address)) then return end
    local entry = entry_of(address)
    local is_new = not (entry.fulls and is_limited(entry))
    if is_new then entry.fulls = (entry.fulls or 0) + 1 end
    hold_ms = hold_ms > 0 and math.max(LEAST_FULL_MS, math.min(hold_ms, MOST_FULL_MS)) or FULL_MS
    local longer_ms = math.min(hold_ms * 2 ^ math.min(entry.fulls - 1, 30), math.max(settings.eject_most_ms, hold_ms))
    entry.cap = math.max(endpoints.in_flight(address) - mine, 0)
    entry.at, entry.cap_until = now_ms, is_new and now_ms + longer_ms or math.max(entry.cap_until, now_ms + hold_ms)
    put(address, entry)
  end

  -- Record the result of a probe of an ejected endpoint. Return whether the endpoint was ejected.
  function outliers.probed(address, is_well)
    local entry = endpoints.outliers[address]
    if not entry or not endpoints.is_ejected(address) then return false end
    if not is_well then
      entry.seen_ms = now_ms
      put(address, entry)
    elseif now_ms >= entry.until_ms then
      try(address, entry)
    end
    return true
  end

  -- Record whether an endpoint is stuck: its requests in flight are old, and its metrics page is unchanged. Eject the
  -- endpoint if the pool ends requests meanwhile. Return whether this call has ejected the endpoint.
  function outliers.stuck(address, is_stuck)
    local entry = entry_of(address)
    if not (is_stuck and is_on() and endpoints.is_ready(address)) then
      if entry.stuck_ms then
        entry.stuck_ms = nil
        put(address, entry)
      end
    elseif not entry.stuck_ms then
      entry.at, entry.stuck_ms, entry.stuck_ended = now_ms, now_ms, pool.ended
      put(address, entry)
    elseif now_ms - entry.stuck_ms >= STUCK_MS and pool.ended > entry.stuck_ended then
      return eject(address, entry, 'stuck')
    end
  end

  -- For the sweep: end ejections that no probe confirms, and drop entries without effect.
  function outliers.sweep()
    if pool.outliers == 0 then return end
    local count = 0
    for address, entry in pairs(endpoints.outliers) do
      count = count + 1
      if read('HEXISTS', key.endpoints, address) == 0 then
        drop(address)
      elseif endpoints.is_ejected(address) then
        if not is_on() or now_ms - math.max(entry.until_ms, entry.seen_ms or 0) > UNSEEN_MS then try(address, entry) end
      else
        local is_over = not entry.cap or entry.cap_until <= now_ms
        if entry.cap and is_over and not entry.fulls then
          if entry.trial then entry.trial, entry.returned_ms = nil, now_ms end
          entry.cap = nil
          put(address, entry)
        end
        local last_ms = math.max(entry.at, entry.until_ms or 0, entry.returned_ms or 0)
        if is_over and now_ms - last_ms > KEPT_MS or not is_on() then drop(address) end
      end
    end
    if count == 0 then pool.outliers = 0 end -- the hash `outliers` was lost
  end
end
