-- include: pool
-- What the pool stores of requests (records, tombstones), of workloads, and of the answers of each flow.
--
-- A record is one request, packed. Its state is queued, orphaned (its replica is silent; stored as `held`), granted or
-- placed. Fields contain no control characters (replicas refuse them), so none ends a string early. There may be
-- millions of waiting requests, so their records leave out endpoints, stock and tag. A call reads each record once.

local record = {}
local reset_records
do -- a chunk may have 200 locals
  local known = {} -- id -> record, or false if there is none
  local tables, used = {}, 0 -- reused by later calls: making them anew would be a call's largest cost
  local changed_ids, changed_count = {}, 0

  function record.new(id)
    used = used + 1
    local r = tables[used]
    if not r then
      r = {}
      tables[used] = r
    end
    r.id, r.due_ms = id, false
    return r
  end

  -- A record that cannot be read, or whose band does not exist, is a stray: it is dropped, and the request is unknown.
  local function parse(id, text)
    local r = record.new(id)
    if not (pcall(unpack_record, r, text) and PRIORITY[r.band]) then
      strays = strays + 1
      record.remove(r)
      defer_write('ZADD', key.unheard, now_ms, id) -- it may run, and is then restored
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

  -- The record that a scan of `requests` has found; nil if this call has removed it.
  function record.from_scan(id, text)
    local r = known[id]
    if r then return r end
    if r == nil and text then return parse(id, text) end
    known[id] = false
  end

  -- The record, or nil.
  function record.read(id)
    local r = known[id]
    if r then return r end
    if r == nil then return record.from_scan(id, redis.call('HGET', key.requests, id)) end
  end

  -- Requests that were restored from their accounting token have no deadline; all others have one.
  record.NO_DEADLINE = 0
  function record.is_restored(r) return r.deadline_ms == record.NO_DEADLINE end

  -- Let this call find r, without writing it.
  function record.know(r) known[r.id] = r end

  -- `put` and `remove` take effect in Redis at the end of the call, once for each id, as the record is then.
  function record.put(r)
    local id = r.id
    known[id], changed_count = r, changed_count + 1
    changed_ids[changed_count] = id
  end

  function record.remove(r)
    local id = r.id
    known[id], changed_count = false, changed_count + 1
    changed_ids[changed_count] = id
  end

  local packed, removed = {}, {} -- reused by each call: id, text, id, text ...; ids
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

  local KEPT = 16 -- larger tables are replaced instead of cleared
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

-- Drop ids from a set that has their times: those older than `life_ms`, and those not among the latest LIMIT; at most
-- `most`. `hash` has a field for each of them, which goes, too. Returns whether there may be more.
local drop_old
do
  local LIMIT = 100000
  function drop_old(set, life_ms, most, hash)
    local count = read('ZCARD', set)
    if count == 0 then return false end
    local over = read('ZCOUNT', set, '-inf', now_ms - life_ms)
    local leaving = math.min(math.max(over, count - LIMIT), most)
    if leaving > 0 then
      for _, id in ipairs(read('ZRANGE', set, 0, leaving - 1)) do
        defer_write('ZREM', set, id)
        if hash then defer_write('HDEL', hash, id) end
      end
    end
    return leaving == most
  end
end

-- Tombstones: requests whose end was reported while some replica was without Redis. A replica that missed the end still
-- has the request in its journal, and must not restore it (renew). `unheard`: requests in flight that were given up
-- without a report of their end; they may run, and their next renewal restores them. The scores of both are times, ms.
local tombstones = {}
do
  local LATE_MS = 2000 -- error of a replica's time of an admission or a renewal, at most
  local GIVEN_UP_MS = 3600000 -- how long a request that was given up may come back
  function tombstones.put(id, ended_ms)
    defer_write('ZADD', key.tombstones, ended_ms, id)
    defer_write('ZREM', key.unheard, id)
  end

  function tombstones.give_up(id) defer_write('ZADD', key.unheard, now_ms, id) end
  function tombstones.was_given_up(id)
    return read('ZSCORE', key.unheard, id)
  end

  function tombstones.has_come_back(id) defer_write('ZREM', key.unheard, id) end

  -- Whether the request has ended. `seen_ms`: when the caller, which admitted the request itself, last saw it alive; if
  -- that is after the end, it is a later request of the same id. nil: another reports it, maybe with an old accounting
  -- token.
  function tombstones.covers(id, seen_ms)
    local ended_ms = tonumber(read('ZSCORE', key.tombstones, id) or nil)
    return ended_ms and not (seen_ms and ended_ms <= seen_ms - LATE_MS)
  end

  -- Drop old tombstones, at most `most` of each kind. Returns whether there may be more. For the sweep.
  function tombstones.expire(most)
    local more = drop_old(key.tombstones, settings.lease_ms + LONGER_MS, most)
    return drop_old(key.unheard, GIVEN_UP_MS, most) or more
  end
end

-- The workload registry (spec 001): total, active, dispatched, average wait (ms), last request (ms), slot, and
-- seven counts of arrivals, newest first, each over a sixth of the rate window. The rate is the newest count, the five
-- before it, and the part of the seventh that the window still covers. Anonymous requests (workload '') leave nothing
-- here. Neither does a workload beyond `max_workloads`, so a client that invents ids cannot make the registry grow.
--
-- It counts by id. Clients choose their ids, so those of two flows may be the same: under `workload-aware` the same is
-- counted by flow and id as well, without active ones, and only that decides a score. So no client can change the order
-- within another flow.
local workloads = {}
local parse_workload, reset_workloads
do
  local WORKLOAD = 'ddddddddddddd'
  -- Workloads are kept for the next call while nobody else changes the pool. (Keeping records would gain less, and need
  -- more memory than Redis does for them.)
  local MOST_KNOWN = 256

  local function unpack_workload(text) return {struct.unpack(WORKLOAD, text)} end

  -- The entries of the hash `name`.
  local function registry(name)
    local it = {known = {}, changed = {}}
    local known_count = 0
    local registered -- how many there are, once this call has asked

    function it.parse(id, text)
      local known, w = false, nil
      if text then
        known, w = pcall(unpack_workload, text)
        if not known then strays = strays + 1 end -- start again
      end
      if not known then w = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0} end
      it.known[id], known_count = w, known_count + 1
      return w
    end

    -- Read the entries of the first `named` ids with one command; '' is no workload.
    local asked_workloads = {} -- reused by each call
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

    -- Whether the registry takes one more workload; if so, it is counted.
    function it.has_room()
      registered = registered or read('HLEN', key[name])
      if settings.max_workloads and registered >= settings.max_workloads then return false end
      registered = registered + 1
      return true
    end

    -- Whether more than half of the room is taken, as far as this call has asked.
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

    local packed = {} -- id, text, and so on: filled again by each call
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

  local names = {} -- reused by each call
  function workloads.prefetch_scores(requests, count)
    if not is_scored() then return end
    for i = 1, count do
      local r = requests[i]
      names[i] = r.workload == '' and '' or joined(r.flow, r.workload)
    end
    by_flow.prefetch(names, count)
  end

  local slot -- the current sixth of a rate window, by number; nil until this call needs it

  -- Move the counts of arrivals to the current slot.
  local function slide(w)
    slot = slot or math.floor(now_ms / (settings.window_ms / 6))
    if slot > w[6] then
      local passed = math.min(slot - w[6], 7)
      for i = 13, 7, -1 do w[i] = i - passed >= 7 and w[i - passed] or 0 end
      w[6] = slot
    end
  end

  -- Requests per second over the window.
  local function rate(w)
    local slot_ms = settings.window_ms / 6
    slide(w)
    local left = 1 - (now_ms % slot_ms) / slot_ms
    return (w[7] + w[8] + w[9] + w[10] + w[11] + w[12] + w[13] * left) / (settings.window_ms / 1000)
  end

  function workloads.rate(id) return rate(by_id.find(id)) end

  -- Of the workload of r in its flow.
  function workloads.rate_of(r)
    return r.workload == '' and 0 or rate(by_flow.find(joined(r.flow, r.workload)))
  end
  function workloads.wait_ms_of(r) return by_flow.find(joined(r.flow, r.workload))[4] end

  -- Returns the entry, or nil if it is new and the registry is full.
  local function count_arrival(registered, name)
    local w = registered.find(name)
    if w[5] <= 0 and not registered.has_room() then return nil end
    if w[6] ~= slot then slide(w) end
    w[1], w[5], w[7] = w[1] + 1, now_ms, w[7] + 1
    registered.changed[name] = w
    return w
  end

  -- Count an arrival. Returns its workload, or '' if that is new and the registry is full.
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

  -- A granted request waits again, and will be dispatched again. The average wait keeps the wait until this grant.
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
    if active < 1 then pool.note_lost('workloads') end -- an active request is always counted
    w[2], w[5] = active > 1 and active - 1 or 0, now_ms
    by_id.changed[id] = w
  end

  -- The request just counted was refused. A workload without earlier requests is then kept only while half of the
  -- registry is free, so that refused requests with invented ids do not crowd out workloads that are served.
  function workloads.refused(flow, id)
    if id == '' then return end
    workloads.ended(id)
    if by_id.find(id)[1] == 1 and by_id.is_half_full() then
      by_id.forget_new(id)
      if is_scored() then by_flow.forget_new(joined(flow, id)) end
    end
  end

  -- A running request whose record was lost.
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

-- The mean length of a flow's answers in tokens: the estimate for requests that set no maximum.
local answers = {}
do
  -- An entry that cannot be read is a stray, and is learned again.
  local function parse_answer(text)
    local known, mean, last_ms = pcall(struct.unpack, 'dd', text)
    if known and mean == mean and mean >= 0 then return mean, last_ms end
    strays = strays + 1
  end

  function answers.mean(flow)
    local text = read('HGET', key.answers, flow)
    return text and parse_answer(text) or settings.default_answer
  end

  local learned, learned_by, new_flows -- flow -> its entry as a call has changed it; that call; its number of new flows

  function answers.learn(flow, tokens)
    if learned_by ~= call_number then learned, learned_by, new_flows = {}, call_number, 0 end
    local text = learned[flow] or read_stored('HGET', key.answers, flow)
    local most = settings.max_workloads
    if not text then
      if most and read_stored('HLEN', key.answers) + new_flows >= most then return end
      new_flows = new_flows + 1
    end
    local mean = text and parse_answer(text)
    mean = mean and pool.smoothed(mean, tokens, settings.answer_alpha) or tokens
    learned[flow] = struct.pack('dd', mean, now_ms)
    defer_write('HSET', key.answers, flow, learned[flow])
  end

  function answers.drop(flow) defer_write('HDEL', key.answers, flow) end
  function answers.idle(text, idle_ms)
    local mean, last_ms = parse_answer(text)
    return not mean or now_ms - last_ms > idle_ms
  end
end
