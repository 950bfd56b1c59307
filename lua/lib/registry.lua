-- include: pool
-- The records of requests, the timers of waiting requests, and the registry of workloads.
-- Uses reads and writes from lib/storage.lua, bands from lib/bands.lua, settings and counters from lib/pool.lua.
-- Defines `record`, `timers`, `workloads` and `parse_workload`.
--
-- A record is one request, packed. The state of a request is queued, orphaned (its replica is silent), granted or
-- placed. Replicas refuse control characters in fields, so no field ends a packed string early. Millions of requests
-- may wait, so the record of a waiting request has no endpoints, stock or tag. A call reads each record once.

local record = {}
local reset_records
do -- a block of its own: Lua allows 200 local variables in a chunk
  local known = {} -- id -> record, or false if there is none
  local tables, used = {}, 0 -- reused by later calls: new tables would be a call's largest cost
  local changed_ids, changed_count = {}, 0

  function record.new(id)
    used = used + 1
    local r = tables[used]
    if not r then
      r = {}
      tables[used] = r
    end
    r.id, r.due_ms, r.tenancy = id, false, 0
    return r
  end

  -- Unpack a record. Drop a record that cannot be unpacked or whose band does not exist: its request is then unknown.
  local function parse(id, text)
    local r = record.new(id)
    if not (pcall(unpack_record, r, text) and PRIORITY[r.band]) then
      strays = strays + 1
      record.remove(r)
      defer_write('ZADD', key.unheard, now_ms, id) -- if the request runs, its next renewal restores it
      return nil
    end
    known[id] = r
    return r
  end

  -- Read the records of the first `count` ids with one command.
  function record.prefetch(ids, count)
    if count == 0 then return end
    local texts = redis.call('HMGET', key.requests, unpack(ids, 1, count))
    for i = 1, count do
      local id, text = ids[i], texts[i]
      if known[id] == nil then
        if text then parse(id, text) else known[id] = false end
      end
    end
  end

  -- Return the record of an id that a scan of `requests` found with `text`; nil if this call has removed the record.
  function record.from_scan(id, text)
    local r = known[id]
    if r then return r end
    if r == nil and text then return parse(id, text) end
    known[id] = false
  end

  -- Return the record of the request with this id, or nil.
  function record.read(id)
    local r = known[id]
    if r then return r end
    if r == nil then return record.from_scan(id, redis.call('HGET', key.requests, id)) end
  end

  record.NO_DEADLINE = 0 -- of a request that was restored from its accounting token; all others have a deadline

  -- Return whether request r is queued or orphaned, rather than granted or placed.
  function record.is_waiting(r) return r.state == STATE_QUEUED or r.state == STATE_ORPHANED end

  -- Let `record.read` find request r in this call, without writing r.
  function record.know(r) known[r.id] = r end

  -- The commit writes the changes made by `put` and `remove`, with the record's values at the time of the commit.
  local function change(id, r)
    changed_count = changed_count + 1
    known[id], changed_ids[changed_count] = r, id
  end
  function record.put(r) change(r.id, r) end
  function record.remove(r) change(r.id, false) end

  local packed, removed = {}, {} -- id, text, id, text ...; ids. Reused by each call
  function record.commit()
    local packs, removals = 0, 0
    for i = 1, changed_count do
      local id = changed_ids[i]
      local r = known[id]
      if r then
        packed[packs + 1], packed[packs + 2] = id, pack_record(r)
        packs = packs + 2
      else
        removals = removals + 1
        removed[removals] = id
      end
    end
    write_values('HSET', key.requests, packed, packs)
    write_values('HDEL', key.requests, removed, removals)
  end

  local KEPT = 16 -- clear a table of up to this many entries for reuse; replace a larger table
  function reset_records()
    local count = 0
    for id in pairs(known) do
      known[id], count = nil, count + 1
    end
    if count > KEPT then known = {} end
    if used > 1000 then tables = {} end
    used, changed_count = 0, 0
  end
end

-- Timers: when each waiting request becomes overdue or expires. Between calls this library caches a lower bound of the
-- earliest due time, and reads no timers before that time.

local timers = {}
do
  local next_ms -- a lower bound of the earliest timer's due time; nil: unknown
  function timers.forget() next_ms = nil end
  function timers.set(id, due_ms)
    if next_ms and due_ms < next_ms then next_ms = due_ms end
    defer_write('ZADD', key.timers, due_ms, id)
  end

  function timers.stop(id) defer_write('ZREM', key.timers, id) end

  -- Return whether the timer of some waiting request is due.
  function timers.due()
    if next_ms and now_ms < next_ms then return false end
    next_ms = tonumber(read('ZRANGE', key.timers, 0, 0, 'WITHSCORES')[2] or math.huge)
    return next_ms <= now_ms
  end
end

-- The workload registry (spec 001). An entry has: total, active, dispatched, average wait (ms), last request (ms),
-- slot, and seven counts of arrivals, newest first, each over a sixth of the rate window. The rate sums the six newest
-- counts and the part of the seventh that the window still covers. Anonymous requests (workload '') are not counted,
-- nor are new workloads beyond `max_workloads`, so a client that invents ids cannot make the registry grow.
--
-- The hash `workloads` counts by workload id. Clients choose the ids, so two flows may use the same id. Under the
-- ordering `workload-aware`, the hash `flow_workloads` therefore counts by flow and id as well, except active requests,
-- and only `flow_workloads` decides scores. So no client can change the order within another flow.
local workloads = {}
local parse_workload, reset_workloads
do
  local WORKLOAD = 'ddddddddddddd'
  -- Size of the cache of workloads, kept between calls while only this library changes the pool. (A cache of records
  -- would gain less, and need more memory than Redis needs for the records.)
  local MOST_KNOWN = 256

  local function unpack_workload(text) return {struct.unpack(WORKLOAD, text)} end

  -- An accessor of the hash `name` (`workloads` by workload id, or `flow_workloads` by flow and workload id).
  local function registry(name)
    local it = {known = {}, changed = {}}
    local known_count = 0
    local registered -- the number of workloads in the registry; nil until this call has read the number

    function it.parse(id, text)
      local known, w = false, nil
      if text then
        known, w = pcall(unpack_workload, text)
        if not known then strays = strays + 1 end -- the counts of a damaged workload entry restart at 0
      end
      if not known then w = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0} end
      it.known[id], known_count = w, known_count + 1
      return w
    end

    -- Read the entries of the first `named` ids with one command; skip '' (anonymous).
    local asked_workloads = {} -- kept from call to call, since creating a table is slow
    function it.prefetch(ids, named)
      local known, asked, count = it.known, asked_workloads, 0
      for i = 1, named do
        local id = ids[i]
        if known[id] == nil and id ~= '' then
          count = count + 1
          asked[count], known[id] = id, false
        end
      end
      if count == 0 then return end
      local texts = read('HMGET', key[name], unpack(asked, 1, count))
      for i = 1, count do it.parse(asked[i], texts[i]) end
    end

    function it.find(id) return it.known[id] or it.parse(id, read('HGET', key[name], id)) end

    -- Return whether the registry has room for a new workload, which then counts as registered.
    function it.has_room()
      registered = registered or read('HLEN', key[name])
      if settings.max_workloads and registered >= settings.max_workloads then return false end
      registered = registered + 1
      return true
    end

    -- Return whether more than half of `max_workloads` is taken; false if this call has not read the number of entries.
    function it.is_half_full()
      local most = settings.max_workloads
      return most and registered and registered > most / 2
    end

    function it.forget_new(id)
      it.known[id], it.changed[id] = nil, nil
      if registered then registered = registered - 1 end
    end

    function it.drop(id)
      it.known[id] = nil
      defer_write('HDEL', key[name], id)
    end

    function it.idle(text, idle_ms)
      local known, _, active, _, _, last_ms = pcall(struct.unpack, WORKLOAD, text)
      if not known then strays = strays + 1 end
      return not known or (active == 0 and now_ms - last_ms > idle_ms)
    end

    local packed = {} -- id, text, id, text ...; reused by each call
    function it.commit()
      local count = 0
      for id, w in pairs(it.changed) do
        packed[count + 1], packed[count + 2] = id, struct.pack(WORKLOAD, unpack(w, 1, 13))
        count = count + 2
      end
      write_values('HSET', key[name], packed, count)
    end

    function it.reset()
      if not cache_is_valid or known_count > MOST_KNOWN then it.known, known_count = {}, 0 end
      if next(it.changed) then it.changed = {} end
      registered = nil
    end
    return it
  end

  local by_id, by_flow = registry('workloads'), registry('flow_workloads')
  workloads.by_id, workloads.by_flow = by_id, by_flow
  workloads.prefetch, parse_workload = by_id.prefetch, by_id.parse

  local function is_scored() return settings.ordering == ORDERING_WORKLOAD_AWARE end

  local names = {} -- kept from call to call, since creating a table is slow
  function workloads.prefetch_scores(requests, count)
    if not is_scored() then return end
    for i = 1, count do
      local r = requests[i]
      names[i] = r.workload == '' and '' or joined(r.flow, r.workload)
    end
    by_flow.prefetch(names, count)
  end

  local slot -- the number of the present slot, a sixth of a rate window; computed once a call

  -- Shift the counts of arrivals so that the newest belongs to the current slot.
  local function slide(w)
    slot = slot or math.floor(now_ms / (settings.window_ms / 6))
    if slot > w[6] then
      local passed = math.min(slot - w[6], 7)
      for i = 13, 7, -1 do w[i] = i - passed >= 7 and w[i - passed] or 0 end
      w[6] = slot
    end
  end

  -- Return a workload's requests per second over the rate window.
  local function rate(w)
    local slot_ms = settings.window_ms / 6
    slide(w)
    local left = 1 - (now_ms % slot_ms) / slot_ms
    return (w[7] + w[8] + w[9] + w[10] + w[11] + w[12] + w[13] * left) / (settings.window_ms / 1000)
  end

  function workloads.rate(id) return rate(by_id.find(id)) end

  -- Return the rate of the workload of request r within r's flow; 0 if r is anonymous.
  function workloads.rate_of(r)
    return r.workload == '' and 0 or rate(by_flow.find(joined(r.flow, r.workload)))
  end
  function workloads.wait_ms_of(r) return by_flow.find(joined(r.flow, r.workload))[4] end

  -- Count an arrival in one registry. Return the workload's entry; nil if it would be new and the registry is full.
  local function count_arrival(registered, name)
    local w = registered.find(name)
    if w[5] <= 0 and not registered.has_room() then return nil end
    if w[6] ~= slot then slide(w) end
    w[1], w[5], w[7] = w[1] + 1, now_ms, w[7] + 1
    registered.changed[name] = w
    return w
  end

  -- Count an arrival. Return the request's workload id, or '' if the workload is new and the registry is full.
  function workloads.arrived(flow, id)
    if id == '' then return '' end
    local w = count_arrival(by_id, id)
    if not w then return '' end
    w[2] = w[2] + 1
    if is_scored() then count_arrival(by_flow, joined(flow, id)) end
    return id
  end

  local function count_dispatch(registered, name, wait_ms)
    local w, alpha = registered.find(name), settings.ema_alpha
    w[4] = w[3] == 0 and wait_ms or pool.smoothed(w[4], wait_ms, alpha)
    w[3] = w[3] + 1
    registered.changed[name] = w
  end

  function workloads.dispatched(r, wait_ms)
    if r.workload == '' then return end
    count_dispatch(by_id, r.workload, wait_ms)
    local name = is_scored() and joined(r.flow, r.workload)
    if name and by_flow.find(name)[5] > 0 then count_dispatch(by_flow, name, wait_ms) end
  end

  -- A granted request returns to the queue: subtract its dispatch. The average keeps the request's wait until this
  -- grant.
  function workloads.sent_back(id)
    if id == '' then return end
    local w = by_id.find(id)
    w[3] = w[3] > 1 and w[3] - 1 or 0
    by_id.changed[id] = w
  end

  function workloads.ended(id)
    if id == '' then return end
    local w = by_id.find(id)
    local active = w[2]
    if active < 1 then pool.note_lost('workloads') end -- the workload's count of active requests was lost
    w[2], w[5] = active > 1 and active - 1 or 0, now_ms
    by_id.changed[id] = w
  end

  -- A request was refused after the function `arrived` counted it. Forget the workload if this was its first request
  -- and the registry is more than half full: refused requests with invented ids must not displace workloads in use.
  function workloads.refused(flow, id)
    if id == '' then return end
    workloads.ended(id)
    if by_id.find(id)[1] == 1 and by_id.is_half_full() then
      by_id.forget_new(id)
      if is_scored() then by_flow.forget_new(joined(flow, id)) end
    end
  end

  -- Count a restored request, which still runs though its record was lost, as an active request of its workload.
  function workloads.restored(id)
    if id == '' then return end
    local w = by_id.find(id)
    w[2], w[5] = w[2] + 1, now_ms
    by_id.changed[id] = w
  end

  function workloads.commit()
    by_id.commit()
    by_flow.commit()
  end

  function reset_workloads()
    by_id.reset()
    by_flow.reset()
    slot = nil
  end
end
