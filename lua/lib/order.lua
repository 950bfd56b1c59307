-- include: record workloads ahead
-- Which request of a lane is served first. Every queued one stands in queue:B:L by arrival, which is the
-- order fcfs; edf and workload-aware keep an index beside it.
--
-- workload-aware (specs/001): score = wait_weight * min(wait / wait_cap, 1) + g, highest first, with
-- g = criticality_weight * criticality / 5 - rate_weight * min(rate / rate_cap, 1). Only the oldest request of
-- a workload competes, its line's head; an anonymous request is its own workload. Below the cap all scores
-- grow alike, so heads stand in `growing` by a key that time does not change: arrival less the time that g
-- is worth. A head past the cap, and one scored by its workload's average, stands in `static` by -score. The
-- better of the two tops is served; a growing top past its cap moves over first, which is exact: overstated
-- as it stands, it would not be ahead with its true score if it is not ahead now.
local order = {}
local function g_of(r)
  return settings.criticality_weight * r.criticality / 5
    - settings.rate_weight * math.min(workloads.rate(r.workload) / settings.rate_cap, 1)
end
local function cap_us() return settings.wait_cap_ms * 1000 end
-- File a head under the score it has now.
local function file(r, lane)
  local growing, static = key.growing[r.band][lane], key.static[r.band][lane]
  local g, waited = g_of(r), nil
  if settings.wait_signal == 'workload_average' and r.workload ~= '' then
    waited = math.min(workloads.wait_ms(r.workload) / settings.wait_cap_ms, 1)
  elseif settings.wait_weight == 0 or now_us - r.arrived >= cap_us() then
    waited = 1
  end
  if waited then
    redis.call('ZREM', growing, r.id)
    redis.call('ZADD', static, -(settings.wait_weight * waited + g), r.id)
  else
    redis.call('ZREM', static, r.id)
    redis.call('ZADD', growing, r.arrived - cap_us() / settings.wait_weight * g, r.id)
  end
end
local function unfile(r, lane)
  local growing, static = key.growing[r.band][lane], key.static[r.band][lane]
  return redis.call('ZREM', growing, r.id) + redis.call('ZREM', static, r.id) > 0
end
local function head_of_line(r, lane)
  local id = redis.call('ZRANGE', key.line(r.band, lane, r.workload), 0, 0)[1]
  return id and record.read(id)
end
function order.insert(r, lane)
  if settings.ordering == 'edf' then
    local edf = key.edf[r.band][lane]
    ahead.forget(edf)
    later('ZADD', edf, r.deadline_ms * 1000 + r.arrived % 1000, r.id)
  elseif settings.ordering == 'workload-aware' then
    if r.workload == '' then return file(r, lane) end
    local line = key.line(r.band, lane, r.workload)
    redis.call('ZADD', line, r.arrived, r.id)
    local first = redis.call('ZRANGE', line, 0, 1)
    if first[1] == r.id and first[2] then unfile(record.read(first[2]), lane) end
    file(record.read(first[1]), lane) -- an arrival changes the rate of the head's workload
  end
end
function order.remove(r, lane)
  if settings.ordering == 'edf' or pool.refiling == 1 then ahead.leave(key.edf[r.band][lane], r.id) end
  if settings.ordering == 'workload-aware' or pool.refiling == 1 then
    local was_head = unfile(r, lane)
    if r.workload ~= '' then
      redis.call('ZREM', key.line(r.band, lane, r.workload), r.id)
      local next_one = was_head and head_of_line(r, lane)
      if next_one then file(next_one, lane) end
    end
  end
end
-- The sorted sets, by lane, of which the first is served next, but for `workload-aware`.
function order.index(band) return (settings.ordering == 'edf' and key.edf or key.queue)[band] end
-- The id that the lane serves next.
function order.head(band, lane)
  if settings.ordering == 'edf' then
    local id = ahead.member(key.edf[band][lane])
    if id then return id end
  elseif settings.ordering == 'workload-aware' then
    while true do
      local growing = redis.call('ZRANGE', key.growing[band][lane], 0, 0, 'WITHSCORES')
      local static = redis.call('ZRANGE', key.static[band][lane], 0, 0, 'WITHSCORES')
      local r = growing[1] and record.read(growing[1])
      if r and now_us - r.arrived >= cap_us() then
        file(r, lane)
      elseif r or static[1] then
        local grown = r and (now_us - tonumber(growing[2])) / cap_us() * settings.wait_weight
        if grown and (not static[1] or grown > -tonumber(static[2])) then return r.id end
        return static[1]
      else
        break
      end
    end
  end
  -- Also while a change of order has not reached this lane yet.
  return ahead.member(key.queue[band][lane])
end
-- The sweep's walk has come by: rates slide without arrivals too.
function order.refresh(r, lane)
  if settings.ordering ~= 'workload-aware' or r.workload == '' then return end
  local head = head_of_line(r, lane)
  if head and head.id == r.id then file(r, lane) end
end
