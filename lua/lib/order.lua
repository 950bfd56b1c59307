-- include: record workloads ahead
-- Which request of a lane is served first. Every queued one stands in queue:B:L: by arrival, which is the order
-- fcfs, or by deadline (edf). workload-aware keeps an index beside it.
--
-- workload-aware (specs/001): score = wait_weight * min(wait / wait_cap, 1) + g, highest first, with
-- g = criticality_weight * criticality / 5 - rate_weight * min(rate / rate_cap, 1). Only the oldest request of
-- a workload competes, its line's head; an anonymous request is its own workload. Below the cap all scores
-- grow alike, so heads stand in `growing` by a key that time does not change: arrival less the time that g
-- is worth. A head past the cap, and one scored by its workload's average, stands in `static` by -score. The
-- better of the two tops is served; a growing top past its cap moves over first, which is exact: overstated
-- as it stands, it would not be ahead with its true score if it is not ahead now.
local order = {}
do
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
      write_now('ZREM', growing, r.id)
      write_now('ZADD', static, -(settings.wait_weight * waited + g), r.id)
    else
      write_now('ZREM', static, r.id)
      write_now('ZADD', growing, r.arrived - cap_us() / settings.wait_weight * g, r.id)
    end
  end
  local function unfile(band, lane, id)
    local grew = write_now('ZREM', key.growing[band][lane], id)
    return write_now('ZREM', key.static[band][lane], id) or grew
  end
  -- The oldest of a line that waits. An id without a waiting request is dropped: the version before has served it.
  local function head_of(line)
    for _ = 1, STRAYS do
      local id = redis.call('ZRANGE', line, 0, 0)[1]
      local r = id and record.read(id)
      if not id or (r and r.state == 'queued') then return r end
      drop_stray('ZREM', line, id)
    end
  end
  -- Where r stands in its lane's own set.
  function order.score(r)
    if settings.ordering == 'edf' then return r.deadline_ms * 1000 + r.arrived % 1000 end -- of one ms, as they arrived
    return r.arrived
  end
  -- What follows is the index of workload-aware; to take something out of it that it does not have does nothing.
  function order.insert(r, lane)
    if r.workload == '' then return file(r, lane) end
    local line = key.line(r.band, lane, r.workload)
    write_now('ZADD', line, r.arrived, r.id)
    local first = redis.call('ZRANGE', line, 0, 1)
    local head = first[1] == r.id and r or head_of(line)
    if head == r and first[2] then unfile(r.band, lane, first[2]) end
    if head then file(head, lane) end -- an arrival changes the rate of the head's workload
  end
  function order.remove(r, lane)
    local was_head = unfile(r.band, lane, r.id)
    if r.workload == '' then return end
    local line = key.line(r.band, lane, r.workload)
    if not write_now('ZREM', line, r.id) then
      line = key.former_line(r.band, lane, r.workload)
      write_now('ZREM', line, r.id)
    end
    local head = was_head and head_of(line)
    -- In a former line, others may stand that only spell its key alike.
    if head and head.workload == r.workload and (lane == '' or head.flow == lane) then file(head, lane) end
  end
  -- The id that the lane serves next; nil while a change of order has not reached it yet.
  function order.head(band, lane)
    while true do
      local growing = redis.call('ZRANGE', key.growing[band][lane], 0, 0, 'WITHSCORES')
      local static = redis.call('ZRANGE', key.static[band][lane], 0, 0, 'WITHSCORES')
      local r = growing[1] and record.read(growing[1])
      if growing[1] and not (r and r.state == 'queued') then
        drop_stray('ZREM', key.growing[band][lane], growing[1])
      elseif r and now_us - r.arrived >= cap_us() then
        file(r, lane)
      elseif r or static[1] then
        local grown = r and (now_us - tonumber(growing[2])) / cap_us() * settings.wait_weight
        if grown and (not static[1] or grown > -tonumber(static[2])) then return r.id end
        return static[1]
      else
        return nil
      end
    end
  end
  -- The sweep's walk has come by: rates slide without arrivals too.
  function order.refresh(r, lane)
    if settings.ordering ~= 'workload-aware' or r.workload == '' then return end
    local head = head_of(key.line(r.band, lane, r.workload))
    if head and head.id == r.id then file(r, lane) end
  end
end
