#!lua name=picker_7a6e0baf
-- What a life uses of Lua and Redis, as locals: among the globals, which Redis guards, one is found in three
-- steps. A library that is being loaded has none of them but `redis`, so the first call brings them.
local function builtins() return redis, struct, string, table, math, ipairs, pairs, tonumber, unpack end
local redis, struct, string, table, math, ipairs, pairs, tonumber, unpack = redis
local function use_builtins()
  if not math then redis, struct, string, table, math, ipairs, pairs, tonumber, unpack = builtins() end
end

-- include: builtins
-- Every key of the pool, derived from the one declared: keys[1] = epp:{POOL}:pool. All carry the hash
-- tag {POOL}, so a Cluster keeps them in one slot and each call is legal there. B is a band (0 to 2), L a
-- lane: what a band orders, the flow's name or, under `fairness: none`, '' for the whole band.
--
-- key          type    what it holds                                             removed by
-- pool         hash    counters (packed, lib/pool.lua), settings, versions       nobody (FLUSHALL)
-- requests     hash    request id -> record (lib/record.lua)                     the request's end
-- inflight     zset    granted or placed request id -> lease expiry, ms          the request's end
-- timers       zset    queued or held id -> when its next thing is due, ms       dispatch, the request's end
-- overdue      zset    queued id -> when it became overdue, us                   dispatch, the request's end
-- queue:B:L    zset    queued ids of a lane -> arrival, us; under edf, deadline  Redis, when empty
-- line:B:L:W   zset    the ids of workload W there -> arrival (workload-aware)   Redis, when empty
-- growing:B:L  zset    heads of lines whose score grows (lib/order.lua)          Redis, when empty
-- static:B:L   zset    heads of lines whose score does not                       Redis, when empty
-- flows:B      zset    backlogged lane -> its start tag                          Redis, when empty
-- parked:B     zset    backlogged lane at its limit -> its start tag             Redis, when empty
-- finish:B     zset    idle lane -> its last finish tag, while above v           sweep
-- victims:B    zset    backlogged lane -> when it was last preempted, us         Redis, when empty
-- preempted:B  zset    the same of idle lanes, under pressure                    sweep
-- limits       hash    limited flow, or flow\31endpoint -> requests in flight    the request's end
-- load         zset    endpoint -> requests in flight (+ UNPICKABLE)             publish, release
-- endpoints    hash    endpoint -> JSON {labels, draining}                       publish
-- marks        hash    drained\31endpoint or down\31endpoint -> since when, ms    undrain, probes, sweep
-- metrics      hash    endpoint -> JSON of its last scrape; and its channel      scraping (app/scraping/)
-- lanes        string  all lanes as one replica read them for all, or its claim  Redis, when old
-- routes       stream  what was routed where, and completed (app/scheduling/)   its own cap
-- workloads    hash    workload id -> metrics (lib/workloads.lua)                sweep, when idle
-- answers      hash    flow -> mean tokens of its answers, last use              sweep, when idle
-- replicas     zset    replica incarnation -> last heartbeat, ms                 sweep
-- about        hash    replica incarnation -> JSON it gave of itself             sweep
-- buried       zset    id whose end was heard without Redis -> until when, ms    sweep
-- orphans      hash    silent replica -> cursor of the sweep's walk              sweep, heartbeat
-- inbox:R      hash    request id -> news for replica R                          place, heartbeat, sweep
-- log          stream  the decision log, when it is on                           its own cap
-- wake:R       channel the same news as a hint to replica R                      (never stored)
local BANDS = {0, 1, 2}
local key -- the keys of the pool that this call is about
local keyrings = {}
-- Texts that begin with `prefix`, by how they end. Each is put together when it is first asked for, and kept:
-- to do it at every turn costs as much as a quarter of a command. Those of a million lanes must not be kept:
-- when they are too many, all are forgotten.
local NAMES_KEPT = 1000
local function names_under(prefix)
  local kept = 0
  local function make(names, ending)
    if kept == NAMES_KEPT then
      for each in pairs(names) do names[each] = nil end
      kept = 0
    end
    local name = prefix .. ending
    names[ending], kept = name, kept + 1
    return name
  end
  return setmetatable({}, {__index = make})
end
local function use_keys(pool_key)
  key = keyrings[pool_key]
  if key then return end
  local base = string.sub(pool_key, 1, -5)
  key = {pool = pool_key}
  for _, name in ipairs({'requests', 'inflight', 'timers', 'overdue', 'limits', 'load', 'endpoints', 'marks',
    'workloads', 'answers', 'replicas', 'about', 'buried', 'orphans', 'lanes', 'log'}) do
    key[name] = base .. name
  end
  for _, kind in ipairs({'flows', 'parked', 'finish', 'victims', 'preempted'}) do
    key[kind] = {}
    for _, band in ipairs(BANDS) do key[kind][band] = base .. kind .. ':' .. band end
  end
  for _, kind in ipairs({'queue', 'growing', 'static'}) do
    key[kind] = {}
    for _, band in ipairs(BANDS) do key[kind][band] = names_under(base .. kind .. ':' .. band .. ':') end
  end
  function key.line(band, lane, workload) return base .. 'line:' .. band .. ':' .. lane .. ':' .. workload end
  key.inbox = names_under(base .. 'inbox:')
  function key.wake(replica) return base .. 'wake:' .. replica end
  keyrings[pool_key] = key
end

-- include: keys
-- Writes put off, so that one command carries what a batch has to say of a key: `later` instead of
-- `redis.call`, for commands that take any number of `a` or `a, b`. Those of one key keep their order. Whoever
-- reads such a key in the same call sends what waits for it first.
local AT_MOST = 2000 -- unpack() puts its values on a stack of limited depth
local waiting = {} -- key -> command and arguments, n of them
local tables, used = {}, 0 -- of this call and former ones: to fill one again costs less than to make it
-- One command with the first `n` of `values`, or as many as it takes.
local function write_all(command, name, values, n)
  if n == 0 then return end
  if n <= AT_MOST then return redis.call(command, name, unpack(values, 1, n)) end
  for first = 1, n, AT_MOST do
    redis.call(command, name, unpack(values, first, math.min(first + AT_MOST - 1, n)))
  end
end
local function give(put_off)
  local n = put_off.n
  put_off.n = 0
  write_all(put_off.command, put_off.key, put_off, n)
end
local function send(name)
  local put_off = waiting[name]
  if put_off then give(put_off) end
end
local function turn_to(command, name)
  local put_off = waiting[name]
  if put_off then
    give(put_off)
  else
    used = used + 1
    put_off = tables[used] or {}
    tables[used], waiting[name] = put_off, put_off
  end
  put_off.command, put_off.key, put_off.n = command, name, 0
  return put_off
end
local function later(command, name, a, b)
  local put_off = waiting[name]
  if not put_off or put_off.command ~= command then put_off = turn_to(command, name) end
  local n = put_off.n + 1
  put_off[n] = a
  if b then
    n = n + 1
    put_off[n] = b
  end
  put_off.n = n
end
local function send_all()
  for i = 1, used do give(tables[i]) end
end
local function forget_writes()
  if used > 100 then tables = {} end
  waiting, used = {}, 0
end

-- include: keys writes
-- One request, packed. state: queued, held (its replica is silent), granted, placed. Fields hold no control
-- characters (replicas refuse them), so none can end a string early. Each is read once a call. While it waits it has
-- no endpoints, takes nothing and is charged nothing; there may be millions of those, so that is left out.
local record = {}
local WAITING, RUNNING = 'BsssBddsBsddH', 'BsssBddsBsddHsdd'
local STATES = {'queued', 'held', 'granted', 'placed'} -- by the first byte
local STATE_NUMBERS = {queued = 1, held = 2, granted = 3, placed = 4}
local LAYOUTS = {WAITING, WAITING, RUNNING, RUNNING}
local known_records = {}
-- Tables of former calls, to be used again: a new one of this size is what a call would spend most on.
local record_tables, records_used = {}, 0
function record.new(id)
  records_used = records_used + 1
  local r = record_tables[records_used]
  if not r then
    r = {}
    record_tables[records_used] = r
  end
  r.id, r.due_ms = id, false
  return r
end
-- A table is found as `record.new` finds it, without the call: this is done for each request at each step.
local function parse_record(id, text)
  records_used = records_used + 1
  local r = record_tables[records_used]
  if not r then
    r = {}
    record_tables[records_used] = r
  end
  local number = string.byte(text)
  r.id, r.due_ms, r.state, number, r.owner, r.attempt, r.flow, r.band, r.weight, r.cost, r.workload, r.criticality,
    r.model, r.arrived, r.deadline_ms, r.limit, r.endpoints, r.taken, r.tag = id, false, STATES[number],
    struct.unpack(LAYOUTS[number], text)
  if number < 3 then r.endpoints, r.taken, r.tag = '', 0, -1 end
  known_records[id] = r
  return r
end
-- Read the records of the first `count` ids in one go.
function record.prefetch(ids, count)
  if count == 0 then return end
  local texts = redis.call('HMGET', key.requests, unpack(ids, 1, count))
  for i = 1, count do
    local id, text = ids[i], texts[i]
    if known_records[id] == nil then
      if text then parse_record(id, text) else known_records[id] = false end
    end
  end
end
-- A record that a scan has come upon.
function record.meet(id, text)
  local r = known_records[id]
  if r then return r end
  if r == nil and text then return parse_record(id, text) end
  known_records[id] = false
end
function record.read(id)
  local r = known_records[id]
  if r then return r end
  if r == nil then return record.meet(id, redis.call('HGET', key.requests, id)) end
end
-- Both are done at the end of the call, once for each id: what is then known of it is what is written.
local changed_ids, changed_count = {}, 0
function record.write(r)
  local id = r.id
  known_records[id] = r
  changed_count = changed_count + 1
  changed_ids[changed_count] = id
end
function record.drop(r)
  local id = r.id
  known_records[id] = false
  changed_count = changed_count + 1
  changed_ids[changed_count] = id
end
local packed, dropped = {}, {} -- id, text, and so on; ids: filled again by each call
function record.save()
  local pack, packs, drops = struct.pack, 0, 0
  for i = 1, changed_count do
    local id = changed_ids[i]
    local r = known_records[id]
    if r then
      local number = STATE_NUMBERS[r.state]
      packed[packs + 1] = id
      packed[packs + 2] = pack(LAYOUTS[number], number, r.owner, r.attempt, r.flow, r.band, r.weight, r.cost,
        r.workload, r.criticality, r.model, r.arrived, r.deadline_ms, r.limit, r.endpoints, r.taken, r.tag)
      packs = packs + 2
    else
      drops = drops + 1
      dropped[drops] = id
    end
  end
  write_all('HSET', key.requests, packed, packs)
  write_all('HDEL', key.requests, dropped, drops)
end
local function forget_records()
  known_records = {}
  if records_used > 1000 then record_tables = {} end
  records_used, changed_count = 0, 0
end

-- The only clock: Redis's own. Replica clocks are never compared.
local now_us, now_ms
local function read_clock()
  local time = redis.call('TIME')
  now_us = tonumber(time[1]) * 1000000 + tonumber(time[2])
  now_ms = math.floor(now_us / 1000)
end

-- include: keys clock writes
-- The pool's counters, read once a call and written once if they changed: doubles in a fixed order, packed,
-- which costs a tenth of as many fields. And its settings, decoded anew only when they have changed.
local pool = {}
-- Those that each band has, by band: a number made into text costs as much as a command.
local QUEUED = {[0] = 'queued:0', 'queued:1', 'queued:2'}
local V = {[0] = 'v:0', 'v:1', 'v:2'}
local NEW = {[0] = 'new:0', 'new:1', 'new:2'}
local BAND_TAG = {[0] = 'band:0', 'band:1', 'band:2'}
local settings, settings_text -- of the last call; a library outlives its calls
-- Whether what former calls left in memory is still so: nobody else has changed the counters since, or published
-- endpoints, as each call does that changes what may be remembered. Not for long: a primary that was none for a while
-- has missed more.
local remembered
local REMEMBERED_MS = 1000
do -- a chunk may have 200 locals
  local COUNTERS = {
    'born', 'stock', 'queued', 'seq', 'dispatches', 'guards', 'ended', 'log_seq', 'queued:0', 'queued:1', 'queued:2',
    'ready', 'upper', 'lower', 'v:0', 'v:1', 'v:2', 'band:0', 'band:1', 'band:2', 'bv', 'credit', 'overdue',
    'rate', 'refiling', 'pressed', 'new:0', 'new:1', 'new:2',
  }
  local counters_text, saved = nil, {} -- as they were last read or saved: packed, and in their order
  -- The first of them change with each request, the others seldom: those stay packed while they do not.
  local BUSY = 8
  local calm_text
  local BUSY_FORMAT, CALM_FORMAT -- made at the first call: a library being loaded has no `string`
  local called_ms, endpoints_version = 0, nil
  local NO_SETTINGS = {
    total_capacity = 0, flow_capacity = 0, lease_ms = 0, silence_ms = 0, fallbacks = 0, log_max = 0,
    window_ms = 60000, ema_alpha = 0.2, guard_share = 0, starvation_ms = 0, ordering = 'fcfs', weights = {},
  }
  -- Counters are only ever added at the end. A version that has fewer writes fewer; what it left out is 0.
  local function whole(text)
    local missing = 8 * #COUNTERS - #text
    return missing > 0 and text .. string.rep('\0', missing) or text
  end
  function pool.read(failed)
    if not BUSY_FORMAT then BUSY_FORMAT, CALM_FORMAT = string.rep('d', BUSY), string.rep('d', #COUNTERS - BUSY) end
    local v = redis.call('HMGET', key.pool, 'counters', 'settings', 'endpoints_version')
    -- Settings come with publish: without them nothing may be admitted.
    pool.known = v[1] and true or false
    local same = not failed and v[1] and v[1] == counters_text
    if not same then
      local text = v[1] and whole(v[1])
      local numbers = text and {struct.unpack(BUSY_FORMAT .. CALM_FORMAT, text)} or {}
      for i = 1, #COUNTERS do pool[COUNTERS[i]] = numbers[i] or 0 end
      counters_text, saved = v[1], text == v[1] and numbers or {} -- what lacks some is written anew
      calm_text = text and string.sub(text, 8 * BUSY + 1)
    end
    remembered = same and v[3] == endpoints_version and now_ms - called_ms < REMEMBERED_MS
    called_ms, endpoints_version = now_ms, v[3]
    pool.ended_before = pool.ended
    if not v[2] then
      settings, settings_text = NO_SETTINGS, nil
    elseif v[2] ~= settings_text then
      settings, settings_text = cjson.decode(v[2]), v[2]
    end
  end
  function pool.save()
    if not pool.known then return end
    local counters, names, values, changed = pool, COUNTERS, saved, 0
    for i = 1, #names do
      local number = counters[names[i]]
      if number ~= values[i] then values[i], changed = number, i end
    end
    if changed == 0 then return end
    if changed > BUSY then calm_text = struct.pack(CALM_FORMAT, unpack(values, BUSY + 1, #names)) end
    counters_text = struct.pack(BUSY_FORMAT, unpack(values, 1, BUSY)) .. calm_text
    redis.call('HSET', key.pool, 'counters', counters_text)
  end
end
-- Give back what a request took. Sums of fractions leave a residue, which must not pass for a request.
local RESIDUE = 1e-6
function pool.release(taken)
  local left = pool.stock - taken
  pool.stock = left > RESIDUE and left or 0
end
-- Bounds follow the number of ready backends. Nine digits undo binary rounding: 20 at 1.15 are 23, not 22.999….
function pool.bound()
  local function scaled(bound) return tonumber(string.format('%.9g', bound * pool.ready)) end
  pool.upper = scaled(settings.upper_per)
  pool.lower = math.max(scaled(settings.lower_per), 1e-9) -- at 0 an empty pool still takes one
end
-- A number no earlier arrival has had, which is also the arrival time in us: it orders a lane.
function pool.arrival(age_ms)
  if age_ms > 0 then return math.floor(now_us - age_ms * 1000 + 0.5) end
  local seq = pool.seq + 1
  if seq < now_us then seq = now_us end
  pool.seq = seq
  return seq
end

-- include: pool
-- The workload registry (specs/001): total, active, dispatched, ema_ms (average wait), last_ms, slot,
-- and seven counts of arrivals, newest first, each over a sixth of the rate window. The rate slides: it
-- is the newest count, the five before, and the part of the seventh that the window still covers.
-- An anonymous request has workload '' and leaves nothing here; nor does one of a workload that would be one
-- too many, so that a client with a new id for each request cannot make the registry grow.
local workloads = {}
local WORKLOAD = 'ddddddddddddd'
local known_workloads, changed_workloads = {}, {}
-- What is known stays for the next call while nobody else has changed the pool, so that it need not be read again.
-- (Records would gain less, and take more than Redis needs for them.)
local MOST_KNOWN = 256
local known_count = 0
local registered -- how many there are, once this call has had to ask
local function parse_workload(id, text)
  local w = text and {struct.unpack(WORKLOAD, text)} or {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
  known_workloads[id], known_count = w, known_count + 1
  return w
end
-- Read what the first `named` ids name in one go, each once; '' is nobody.
local asked_workloads = {} -- filled again by each call
function workloads.prefetch(ids, named)
  local known, asked, count = known_workloads, asked_workloads, 0
  for i = 1, named do
    local id = ids[i]
    if known[id] == nil and id ~= '' then
      count = count + 1
      asked[count], known[id] = id, false
    end
  end
  if count == 0 then return end
  local texts = redis.call('HMGET', key.workloads, unpack(asked, 1, count))
  for i = 1, count do parse_workload(asked[i], texts[i]) end
end
local function workload(id)
  return known_workloads[id] or parse_workload(id, redis.call('HGET', key.workloads, id))
end
local slot -- of the rate window, now
local function slide(w)
  slot = slot or math.floor(now_ms / (settings.window_ms / 6))
  if slot > w[6] then
    local passed = math.min(slot - w[6], 7)
    for i = 13, 7, -1 do w[i] = i - passed >= 7 and w[i - passed] or 0 end
    w[6] = slot
  end
end
-- Requests a second over the window.
function workloads.rate(id)
  if id == '' then return 0 end
  local w, slot_ms = workload(id), settings.window_ms / 6
  slide(w)
  local left = 1 - (now_ms % slot_ms) / slot_ms
  return (w[7] + w[8] + w[9] + w[10] + w[11] + w[12] + w[13] * left) / (settings.window_ms / 1000)
end
-- Whether one more may be registered; then it counts as if it were.
local function is_room()
  registered = registered or redis.call('HLEN', key.workloads)
  if settings.max_workloads and registered >= settings.max_workloads then return false end
  registered = registered + 1
  return true
end
function workloads.wait_ms(id) return workload(id)[4] end
-- Returns the workload of an arrival: its own, or '' if that is new and there is no room for it.
function workloads.arrived(id)
  if id == '' then return '' end
  local w = known_workloads[id] or workload(id)
  if w[5] <= 0 and not is_room() then return '' end
  if w[6] ~= slot then slide(w) end
  w[1], w[2], w[5], w[7] = w[1] + 1, w[2] + 1, now_ms, w[7] + 1
  changed_workloads[id] = w
  return id
end
function workloads.dispatched(id, wait_ms)
  if id == '' then return end
  local w, alpha = known_workloads[id] or workload(id), settings.ema_alpha
  w[4] = w[3] == 0 and wait_ms or alpha * wait_ms + (1 - alpha) * w[4]
  w[3] = w[3] + 1
  changed_workloads[id] = w
end
function workloads.ended(id)
  if id == '' then return end
  local w = known_workloads[id] or workload(id)
  local active = w[2]
  w[2], w[5] = active > 1 and active - 1 or 0, now_ms
  changed_workloads[id] = w
end
-- One that has just arrived was not let in. A workload that nobody knew yet is then kept only while half of the
-- registry is free: requests that are all refused, each of a new workload, must not crowd out those that are served.
function workloads.turned_away(id)
  if id == '' then return end
  workloads.ended(id)
  local most = settings.max_workloads
  if most and workload(id)[1] == 1 and registered and registered > most / 2 then
    known_workloads[id], changed_workloads[id] = nil, nil
    registered = registered - 1
  end
end
-- A request known to be running, of which the registry has lost sight.
function workloads.restored(id)
  if id == '' then return end
  local w = workload(id)
  w[2], w[5] = w[2] + 1, now_ms
  changed_workloads[id] = w
end
function workloads.drop(id)
  known_workloads[id] = nil
  redis.call('HDEL', key.workloads, id)
end
function workloads.idle(text, idle_ms)
  local _, active, _, _, last_ms = struct.unpack('ddddd', text)
  return active == 0 and now_ms - last_ms > idle_ms
end
local packed_workloads = {} -- id, text, and so on: filled again by each call
function workloads.save()
  local count = 0
  for id, w in pairs(changed_workloads) do
    packed_workloads[count + 1], packed_workloads[count + 2] = id, struct.pack(WORKLOAD, unpack(w, 1, 13))
    count = count + 2
  end
  write_all('HSET', key.workloads, packed_workloads, count)
end
local function forget_workloads()
  if not remembered or known_count > MOST_KNOWN then known_workloads, known_count = {}, 0 end
  changed_workloads, registered, slot = {}, nil, nil
end

-- include: writes
-- What dispatch takes from the front of sorted sets, read ahead: of a band's lanes, and of a lane's requests, as
-- many as it may serve. What it changes is put off (lib/writes.lua). Whoever else reads such a set, or changes
-- it in another way, asks `anew` for its key: what was put off is then written, and what was read is forgotten.
local ahead = {}
local expected = 1 -- how many may be served
local fronts = {} -- key -> what was read: members from `at` on; `whole` if there are no more
local function forget_fronts() expected, fronts = 1, {} end
function ahead.expect(count) expected = math.max(count, 1) end -- of 0, all would be read
-- What has left a front of members leaves Redis by its rank: all that stood before `at`. What has moved,
-- maybe several times, takes the last of its scores (false: it left).
local scored_members, gone_members = {}, {} -- filled again by each call
local function give_front(name, front)
  local scores = front.scores
  if not scores then
    if front.at > 1 then redis.call('ZREMRANGEBYRANK', name, 0, front.at - 2) end
    return
  end
  local moved, gone = 0, 0
  for member, score in pairs(scores) do
    if score then
      scored_members[moved + 1], scored_members[moved + 2] = score, member
      moved = moved + 2
    else
      gone = gone + 1
      gone_members[gone] = member
    end
  end
  write_all('ZADD', name, scored_members, moved)
  write_all('ZREM', name, gone_members, gone)
end
function ahead.forget(name)
  local front = fronts[name]
  if front then
    fronts[name] = nil
    give_front(name, front)
  end
end
function ahead.anew(name)
  if fronts[name] then ahead.forget(name) end
  if waiting[name] then send(name) end
  return name
end
function ahead.save()
  for name, front in pairs(fronts) do give_front(name, front) end
end
-- Of members that only ever leave: the first. One more than is asked for is read, to know whether it is the last.
local function read_members(name, more)
  local front = redis.call('ZRANGE', ahead.anew(name), 0, more)
  front.at, front.whole = 1, #front <= more
  fronts[name] = front
  return front
end
function ahead.member(name)
  local front = fronts[name]
  local member = front and front[front.at]
  if member or (front and front.whole) then return member end
  return read_members(name, 1)[1]
end
-- The first `count`, at the end of `found`.
function ahead.members(name, count, found)
  local front, known = read_members(name, count), #found
  for i = 1, math.min(count, #front) do found[known + i] = front[i] end
end
-- It leaves. Returns whether it was the last, if that is known.
function ahead.leave(name, member)
  local front = fronts[name]
  if front and front[front.at] == member then
    local at = front.at + 1
    front.at = at
    if front[at] then return false end
    return front.whole or nil
  end
  ahead.forget(name)
  later('ZREM', name, member)
  return nil
end
-- Of members that come back with a higher score: the first, and its score. Those that have come back stand in
-- `back` from `first` to `last`, and their scores in `scores`; equals go by name, as in Redis.
local function precedes(score, member, other_score, other)
  return score < other_score or (score == other_score and member < other)
end
local function read_scored(name)
  local front = redis.call('ZRANGE', ahead.anew(name), 0, expected - 1, 'WITHSCORES')
  local count = #front
  for i = 2, count, 2 do front[i] = tonumber(front[i]) end
  front.at, front.whole, front.end_member, front.end_score = 1, count < 2 * expected, front[count - 1], front[count]
  front.back, front.scores, front.first, front.last = {}, {}, 1, 0
  fronts[name] = front
  return front
end
-- What was read: member, score, and so on.
function ahead.front(name)
  local front = fronts[name]
  if front and (front.whole or front[front.at] or front.back[front.first]) then return front end
  return read_scored(name)
end
function ahead.scored(name)
  local front = fronts[name]
  if not (front and front[front.at]) then front = ahead.front(name) end
  local at, other = front.at, front.back[front.first]
  local member, score = front[at], front[at + 1]
  if not other then return member, score end
  local other_score = front.scores[other]
  if member and precedes(score, member, other_score, other) then return member, score end
  return other, other_score
end
-- The first comes back with `score`, or leaves: nil.
function ahead.move(name, member, score)
  local front = fronts[name]
  if front and front[front.at] == member then
    front.at = front.at + 2
  elseif front and front.back[front.first] == member then
    front.first = front.first + 1
  else
    ahead.forget(name)
    if score then later('ZADD', name, score, member) else later('ZREM', name, member) end
    return
  end
  local scores, first, last = front.scores, front.first, front.last
  scores[member] = score or false
  if not score or not (front.whole or precedes(score, member, front.end_score, front.end_member)) then return end
  local back = front.back
  local i = last
  while i >= first and precedes(score, member, scores[back[i]], back[i]) do
    back[i + 1] = back[i]
    i = i - 1
  end
  back[i + 1], front.last = member, last + 1
end

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
-- Where r stands in its lane's own set.
function order.score(r)
  if settings.ordering == 'edf' then return r.deadline_ms * 1000 + r.arrived % 1000 end -- of one ms, as they arrived
  return r.arrived
end
-- What follows is the index of workload-aware; to take something out of it that it does not have does nothing.
function order.insert(r, lane)
  if r.workload == '' then return file(r, lane) end
  local line = key.line(r.band, lane, r.workload)
  redis.call('ZADD', line, r.arrived, r.id)
  local first = redis.call('ZRANGE', line, 0, 1)
  if first[1] == r.id and first[2] then unfile(record.read(first[2]), lane) end
  file(record.read(first[1]), lane) -- an arrival changes the rate of the head's workload
end
function order.remove(r, lane)
  local was_head = unfile(r, lane)
  if r.workload ~= '' then
    redis.call('ZREM', key.line(r.band, lane, r.workload), r.id)
    local next_one = was_head and head_of_line(r, lane)
    if next_one then file(next_one, lane) end
  end
end
-- The id that the lane serves next; nil while a change of order has not reached it yet.
function order.head(band, lane)
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
      return nil
    end
  end
end
-- The sweep's walk has come by: rates slide without arrivals too.
function order.refresh(r, lane)
  if settings.ordering ~= 'workload-aware' or r.workload == '' then return end
  local head = head_of_line(r, lane)
  if head and head.id == r.id then file(r, lane) end
end

-- include: pool
-- The decision log: one stream entry an event, in the order of decisions; off when log_max is 0.
-- Written at the end of a call: one that fails on its way, and may be asked again, leaves no entry.
-- `tag` is a lane's start tag at this moment, `by` turn or guard, `note` as docs/redis-schema.md lists it.
local entries, logged = {}, 0
local function full(number) return string.format('%.17g', number) end
local function log(event, r, tag, by, about)
  if settings.log_max == 0 then return end
  pool.log_seq = pool.log_seq + 1
  logged = logged + 1
  entries[logged] = {'MAXLEN', '~', settings.log_max, '*',
    'seq', full(pool.log_seq), 'time_us', full(now_us), 'event', event, 'request', r.id, 'flow', r.flow,
    'band', r.band, 'workload', r.workload, 'cost', full(r.cost), 'weight', full(r.weight),
    'arrived', full(r.arrived), 'deadline_ms', full(r.deadline_ms), 'due_ms', r.due_ms and full(r.due_ms) or '',
    'limit', full(r.limit), 'tag', tag and full(tag) or '', 'v', full(pool[V[r.band]]), 'by', by or '',
    'owner', r.owner, 'endpoint', string.match(r.endpoints, '^[^,]*'), 'stock', full(pool.stock),
    'queued', full(pool.queued), 'upper', full(pool.upper), 'lower', full(pool.lower),
    'note', type(about) == 'number' and full(about) or about or ''}
end
local function send_log()
  for i = 1, logged do redis.call('XADD', key.log, unpack(entries[i])) end
end
local function forget_log() entries, logged = {}, 0 end
-- Something about a lane or the whole pool rather than a request.
local NOBODY = {
  id = '', flow = '', band = 0, workload = '', cost = 0, weight = 1, arrived = 0, deadline_ms = 0, limit = 0,
  owner = '', endpoints = '',
}
local function log_change(event, note_text) log(event, NOBODY, nil, nil, note_text) end
local function log_lane(event, band, lane, tag)
  if settings.log_max == 0 then return end
  local about = {}
  for name, value in pairs(NOBODY) do about[name] = value end
  about.band, about.flow = band, lane
  log(event, about, tag)
end

-- include: pool ahead
-- Who gives way where the queue is full: `victims` has every backlogged lane below Critical by when it was last
-- preempted, kept as lanes come and go, so that no call ever has to put it together. Lanes that have drained
-- since are remembered in `preempted`, while there is pressure.
local victims = {}
function victims.expose(band, lane)
  local last = pool.pressed == 1 and redis.call('ZSCORE', key.preempted[band], lane)
  if last then redis.call('ZREM', key.preempted[band], lane) end
  later('ZADD', key.victims[band], last or 0, lane)
end
function victims.shield(band, lane)
  if pool.pressed == 1 then
    send(key.victims[band])
    local last = redis.call('ZSCORE', key.victims[band], lane)
    if tonumber(last or 0) > 0 then redis.call('ZADD', key.preempted[band], last, lane) end
  end
  later('ZREM', key.victims[band], lane)
end
-- The lane to be preempted next, and its newest request (under edf, that with the latest deadline); nil if there is
-- none.
local VICTIMS_LOOKED_AT = 16
function victims.next(band)
  send(key.victims[band])
  -- A version that does not keep the order leaves lanes in it that have drained, and out of it others.
  for _ = 1, VICTIMS_LOOKED_AT do
    local lane = redis.call('ZRANGE', key.victims[band], 0, 0)[1]
      or redis.call('ZRANGE', ahead.anew(key.flows[band]), 0, 0)[1]
    if not lane then return nil end
    local last = redis.call('ZRANGE', ahead.anew(key.queue[band][lane]), -1, -1)[1]
    if last then return lane, last end
    redis.call('ZREM', key.victims[band], lane)
  end
end
-- The sweep's part: when the pressure has ended so does the memory of who was preempted, `most` lanes of a band
-- a call. Returns whether there may be more.
function victims.relax(most)
  local more = false
  for band = 1, 2 do
    local places, lanes = key.victims[band], {}
    send(places)
    for _, lane in ipairs(redis.call('ZRANGEBYSCORE', places, '(0', '+inf', 'LIMIT', 0, most)) do
      lanes[#lanes + 1] = 0
      lanes[#lanes + 1] = lane
    end
    if #lanes > 0 then redis.call('ZADD', places, unpack(lanes)) end
    local idle = redis.call('ZREMRANGEBYRANK', key.preempted[band], 0, most - 1)
    more = more or #lanes == 2 * most or idle == most
  end
  return more
end
-- Lanes that a version without this order has filled come into it, `most` a call; in one version none are missing.
function victims.complete(most)
  for band = 1, 2 do
    local places, flows, lanes = key.victims[band], ahead.anew(key.flows[band]), {}
    send(places)
    if redis.call('ZCARD', places) < redis.call('ZCARD', flows) then
      for _, lane in ipairs(redis.call('ZRANDMEMBER', flows, most)) do
        lanes[#lanes + 1] = 0
        lanes[#lanes + 1] = lane
      end
      redis.call('ZADD', places, 'NX', unpack(lanes))
    end
    if pool[QUEUED[band]] == 0 then redis.call('UNLINK', places) end
  end
end

-- include: pool
-- When the next thing of each waiting request is due. The earliest is remembered, or a moment before it: until then
-- there is nothing to ask for.
local timers = {}
do
  local next_ms -- nil: not known
  function timers.forget()
    if not remembered then next_ms = nil end
  end
  function timers.set(id, due_ms)
    if next_ms and due_ms < next_ms then next_ms = due_ms end
    later('ZADD', key.timers, due_ms, id)
  end
  function timers.stop(id) later('ZREM', key.timers, id) end
  -- Whether there is one whose time has come; all are then in Redis.
  function timers.due()
    if next_ms and now_ms < next_ms then return false end
    send(key.timers)
    next_ms = tonumber(redis.call('ZRANGE', key.timers, 0, 0, 'WITHSCORES')[2] or math.huge)
    return next_ms <= now_ms
  end
end

-- include: order log victims timers
-- The queue: bands, in each band lanes ordered by start tag, in each lane requests by the ordering.
-- Start-time fair queueing (Goyal, Vin, Cheng, 1996; several servers: Jin, Chase, Kaur, SFQ(D), 2004):
-- a lane that becomes backlogged starts at S = max(v, F); serving it sets v = S and F = S + share.
-- One tag a lane: a request that leaves early leaves no hole. docs/fairness.md has the proofs.
local queue = {}
-- What serving r costs its lane.
function queue.share(r)
  if settings.fairness == 'round-robin' then return 1 end
  if settings.fairness == 'none' then return r.cost end
  return r.cost / (settings.weights[r.flow] or r.weight)
end
function queue.lane(r) return settings.fairness == 'none' and '' or r.flow end
-- The lane that r stands in: while requests are being refiled it may still be the one of the former policy.
local function standing_lane(r)
  local lane, lanes = queue.lane(r), key.queue[r.band]
  if pool.refiling == 0 or redis.call('ZSCORE', ahead.anew(lanes[lane]), r.id) then return lane end
  local other = lane == '' and r.flow or ''
  return redis.call('ZSCORE', ahead.anew(lanes[other]), r.id) and other or lane
end
local lengths = {} -- of lanes, by the key of their requests, as this call knows them
local function forget_lengths() lengths = {} end
function queue.length(band, lane)
  local requests = key.queue[band][lane]
  local length = lengths[requests]
  if not length then
    length = redis.call('ZCARD', ahead.anew(requests))
    lengths[requests] = length
  end
  return length
end
function queue.due_ms(r)
  local arrived, deadline_ms, patience_ms = r.arrived, r.deadline_ms, settings.starvation_ms
  local arrived_ms = (arrived - arrived % 1000) / 1000
  if patience_ms == 0 then
    local left_ms = deadline_ms - arrived_ms
    patience_ms = (left_ms - left_ms % 2) / 2
  end
  local due_ms = arrived_ms + patience_ms
  return due_ms < deadline_ms and due_ms or deadline_ms
end
local function grow(band, change)
  local counters, name = pool, QUEUED[band]
  counters.queued, counters[name] = counters.queued + change, counters[name] + change
end
-- Where a lane begins that becomes backlogged with r, having last been charged up to `finish`. One that is owed
-- nothing starts at v, ahead of all that have been served since; so a client with a new flow for each request
-- would hold v where it is and the others off. Those that start so are therefore counted like one flow of weight
-- 1 (`new`), and when they are NEWCOMERS ahead of v the next start a share later, as if they had been served once.
local NEWCOMERS = 100
local function start_tag(r, finish)
  local v, new, share = pool[V[r.band]], NEW[r.band], queue.share(r)
  if finish > v then return finish end
  local reached = math.max(pool[new], v)
  if reached - v >= NEWCOMERS * share then return v + share end
  pool[new] = reached + share
  return v
end
-- A lane takes its place in the order. A band that had none to serve has no claim to the turns it missed.
local function join(band, lane, tag)
  local flows, name = key.flows[band], BAND_TAG[band]
  if pool[name] < pool.bv and redis.call('ZCARD', ahead.anew(flows)) == 0 then pool[name] = pool.bv end
  ahead.forget(flows)
  later('ZADD', flows, tag, lane)
end
-- Put r in at its place. Returns the lane's start tag if it has just become backlogged. Its record is
-- written by the caller. Writes are put off to the end of the call, so that one which fails halfway, and is then
-- repeated, has left nothing of it; what may be left all the same is dropped at its turn (`drop_stray`).
function queue.insert(r)
  local band, lane = r.band, settings.fairness == 'none' and '' or r.flow
  local requests = key.queue[band][lane]
  local length = lengths[requests] or queue.length(band, lane)
  if fronts[requests] then ahead.forget(requests) end
  later('ZADD', requests, order.score(r), r.id)
  lengths[requests] = length + 1
  if settings.ordering == 'workload-aware' then
    known_records[r.id] = r
    order.insert(r, lane)
  end
  local due_ms = queue.due_ms(r)
  r.due_ms = due_ms
  timers.set(r.id, due_ms)
  grow(band, 1)
  if length > 0 then return nil end
  send(key.finish[band])
  local tag = start_tag(r, tonumber(redis.call('ZSCORE', key.finish[band], lane) or 0))
  join(band, lane, tag)
  if band > 0 then victims.expose(band, lane) end
  return tag
end
local function retire(band, lane, tag)
  ahead.move(key.flows[band], lane)
  later('ZADD', key.finish[band], tag, lane)
  if band > 0 then victims.shield(band, lane) end
end
-- Take r off everything that orders it in the lane in which it stands. Returns whether that is now empty.
local function unqueue(r, lane)
  local id, band = r.id, r.band
  local requests = key.queue[band][lane]
  local emptied, left = ahead.leave(requests, id), lengths[requests]
  if left then
    lengths[requests], emptied = left - 1, left == 1
  elseif emptied == nil then
    emptied = queue.length(band, lane) == 0
  end
  if settings.ordering == 'workload-aware' or pool.refiling == 1 then order.remove(r, lane) end
  timers.stop(id)
  if pool.overdue > 0 then pool.overdue = pool.overdue - redis.call('ZREM', key.overdue, id) end
  grow(band, -1)
  return emptied
end
-- Take r out without serving it: its lane's tag stays as it is.
function queue.remove(r)
  local lane = standing_lane(r)
  if not unqueue(r, lane) then return end
  local tag = redis.call('ZSCORE', ahead.anew(key.flows[r.band]), lane)
  if not tag then
    tag = redis.call('ZSCORE', key.parked[r.band], lane)
    redis.call('ZREM', key.parked[r.band], lane)
  end
  if tag then retire(r.band, lane, tag) end
end
-- Take out an id that no queued request has: a call that put it there has failed, and was not repeated.
function queue.drop_stray(id, band, lane, tag)
  local requests = ahead.anew(key.queue[band][lane])
  redis.call('ZREM', requests, id)
  for _, index in ipairs({key.growing, key.static}) do
    redis.call('ZREM', ahead.anew(index[band][lane]), id)
  end
  lengths[requests] = redis.call('ZCARD', requests)
  if lengths[requests] == 0 then retire(band, lane, tag) end
end
-- Take r out and charge it to its lane, whose start tag is `tag`. The turn of a lane (`turn_of`) moves v to
-- the tag; what the guard serves out of turn (nil) does not.
function queue.serve(r, tag, turn_of)
  local lane, band, share = turn_of or standing_lane(r), r.band, queue.share(r)
  local emptied = unqueue(r, lane)
  if turn_of and tag > pool[V[band]] then pool[V[band]] = tag end
  if emptied then
    retire(band, lane, tag + share)
  else
    ahead.move(key.flows[band], lane, tag + share)
  end
  if settings.band_policy == 'weighted' then
    if turn_of then pool.bv = math.max(pool.bv, pool[BAND_TAG[band]]) end
    queue.charge_band(r, r.cost)
  end
  return share
end
-- Change what a lane has been charged, by what is now known to be right; `floor` is the least its tag can be.
-- Returns the lane's tag after it.
function queue.correct(r, lane, change, floor)
  for _, place in ipairs({key.flows[r.band], key.parked[r.band], key.finish[r.band]}) do
    ahead.anew(place)
    if redis.call('ZSCORE', place, lane) then return tonumber(redis.call('ZINCRBY', place, change, lane)) end
  end
  redis.call('ZADD', key.finish[r.band], floor + change, lane)
  return floor + change
end
-- Charge its band `cost` more, where bands have shares; negative, it takes back what was charged.
function queue.charge_band(r, cost)
  if settings.band_policy ~= 'weighted' then return end
  local name = BAND_TAG[r.band]
  pool[name] = pool[name] + cost / settings.band_weights[r.band + 1]
end
-- A lane whose flow is at its limit leaves the order, and comes back without a claim to what it missed.
function queue.park(band, lane, tag)
  ahead.move(key.flows[band], lane)
  redis.call('ZADD', key.parked[band], tag, lane)
  log_lane('parked', band, lane, tag)
end
function queue.unpark(band, lane)
  local tag = redis.call('ZSCORE', key.parked[band], lane)
  if not tag then return end
  redis.call('ZREM', key.parked[band], lane)
  tag = math.max(pool[V[band]], tonumber(tag))
  join(band, lane, tag)
  log_lane('unparked', band, lane, tag)
end
-- Keep a silent replica's request for whoever brings its id, out of the order until then. Its own deadline
-- stays in its record: whoever adopts it has the rest of its TTL.
function queue.hold(r, until_ms)
  queue.remove(r)
  r.state = 'held'
  timers.set(r.id, math.min(r.deadline_ms, until_ms))
  record.write(r)
  log('held', r)
end
-- The walk of a changed policy has come by: stand where the policy now in force would have put r.
function queue.refile(r)
  local lane = standing_lane(r)
  if lane ~= queue.lane(r) then
    queue.remove(r)
    queue.insert(r)
  else
    local requests = key.queue[r.band][lane]
    ahead.forget(requests)
    later('ZADD', requests, order.score(r), r.id)
    order.remove(r, lane)
    if settings.ordering == 'workload-aware' then order.insert(r, lane) end
  end
end
-- The bands in the order in which they come next.
local function bands_in_turn()
  if settings.band_policy ~= 'weighted' then return BANDS end
  local bands = {unpack(BANDS)}
  table.sort(bands, function(a, b)
    local tag_a, tag_b = pool[BAND_TAG[a]], pool[BAND_TAG[b]]
    return tag_a < tag_b or (tag_a == tag_b and a < b)
  end)
  return bands
end
-- Read what up to `count` turns are likely to need: the lanes whose turn is near, and the records of those who are
-- then served if each lane has its part of the turns.
function queue.look_ahead(count)
  ahead.expect(count)
  if count < 2 or settings.ordering == 'workload-aware' then return end
  local bands, at = bands_in_turn(), 1
  while pool[QUEUED[bands[at]]] == 0 do at = at + 1 end
  local band, ids = bands[at], {}
  local lanes, requests = ahead.front(key.flows[band]), key.queue[band]
  local each, odd = math.floor(2 * count / #lanes), 2 * count % #lanes
  for i = 1, #lanes, 2 do
    local part = i < odd and each + 1 or each
    ahead.members(requests[lanes[i]], part, ids)
  end
  record.prefetch(ids, #ids)
end
-- Whose turn it is: an id, its lane's start tag, its band and lane; nil when nobody can be served.
function queue.turn()
  local bands = settings.band_policy == 'weighted' and bands_in_turn() or BANDS
  for i = 1, 3 do
    local band = bands[i]
    if pool[QUEUED[band]] > 0 then
      local lane, tag = ahead.scored(key.flows[band])
      if lane then
        local best = settings.ordering == 'workload-aware' and order.head(band, lane)
        return best or ahead.member(key.queue[band][lane]), tag, band, lane
      end
    end
  end
end
-- The most overdue request of the whole queue whose lane is not parked; nil if there is none near the front.
local GUARD_LOOKS_AT = 16
function queue.most_overdue()
  for _, id in ipairs(redis.call('ZRANGE', key.overdue, 0, GUARD_LOOKS_AT - 1)) do
    local r = record.read(id)
    local tag = redis.call('ZSCORE', ahead.anew(key.flows[r.band]), standing_lane(r))
    if tag then return id, tonumber(tag) end
  end
end

-- include: pool
-- Live load of every endpoint, and the choice among them. An endpoint that must take nothing new
-- (draining, or gone but still serving) is kept above UNPICKABLE, so its count stays exact.
-- A flow may have a limit of requests in flight on each endpoint; `limits` counts those of such flows.
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
local function set_load(address, load)
  loads[address], changed_loads[address] = load, true
end
function endpoints.reserve(address)
  local load = loads[address] or load_of(address)
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
  local load = load_of(address)
  local count = load >= UNPICKABLE and load - UNPICKABLE or math.max(load, 0)
  local listed_load = draining and count + UNPICKABLE or count
  if listed_load ~= load then
    set_load(address, listed_load)
    window = nil -- it may be new
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
-- Those on which r's flow is below its limit; and whether there is one but for that.
local function below_limit(r, among)
  local able, fields, free = {}, {}, {}
  for _, address in ipairs(among) do
    if is_pickable(load_of(address)) then
      able[#able + 1] = address
      fields[#fields + 1] = r.flow .. '\31' .. address
    end
  end
  if #able == 0 then return free, false end
  local counts = redis.call('HMGET', key.limits, unpack(fields))
  for i, address in ipairs(able) do
    if tonumber(counts[i] or 0) < r.limit then free[#free + 1] = address end
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
-- 'a,b,c' with up to `fallbacks` more than one, the loads that were seen, and the first; or nil, and whether
-- it is only the flow's limit that stands in the way.
local best_ones, their_burdens = {}, {} -- filled again by each choice
function endpoints.pick(r, candidates, turn, picks)
  local want, among, scores, named = settings.fallbacks + 1
  if candidates ~= '*' then
    named, scores = listed(candidates)
    among = named
  elseif r.limit > 0 then
    among = redis.call('ZRANGE', key.load, 0, -1)
  else
    if not window or window_left < 1 then read_window(picks, want) end
    among, window_left = window, window_left - 1
  end
  local limited = false
  if r.limit > 0 then among, limited = below_limit(r, among) end
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
  if kept == 0 then return nil, limited end
  return table.concat(best, ',', 1, kept), loads_seen(named, among, burdens, kept), best[1]
end
-- Why an endpoint that is published takes nothing new: drained by an operator, or down. Each mark has its time.
local MARKS = {'drained', 'down'}
local function mark_of(what, address) return what .. '\31' .. address end
function endpoints.is_marked(address)
  for _, what in ipairs(MARKS) do
    if redis.call('HEXISTS', key.marks, mark_of(what, address)) == 1 then return true end
  end
  return false
end
-- Set or take away a mark. Returns whether the endpoint is known.
function endpoints.mark(what, on, address)
  local about = redis.call('HGET', key.endpoints, address)
  if not about then return false end
  local before = endpoints.is_marked(address)
  if on then
    redis.call('HSET', key.marks, mark_of(what, address), now_ms)
  else
    redis.call('HDEL', key.marks, mark_of(what, address))
  end
  local after = endpoints.is_marked(address)
  if before == after then return true end
  redis.call('HINCRBY', key.pool, 'marks_version', 1)
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
    found[string.match(mark, '\31(.*)$')] = true
  end
  return found
end
function endpoints.forget_marks(address)
  for _, what in ipairs(MARKS) do redis.call('HDEL', key.marks, mark_of(what, address)) end
end
-- A mark `down` that nobody has confirmed for so long lapses: the next request tries the endpoint.
function endpoints.lapse(down_ms)
  local marks = redis.call('HGETALL', key.marks)
  for i = 1, #marks, 2 do
    local address = string.match(marks[i], '^down\31(.*)$')
    if address and now_ms - tonumber(marks[i + 1]) > down_ms then endpoints.mark('down', false, address) end
  end
end
-- A limited flow's requests in flight: all of them (granted and placed), and those on one endpoint.
-- What is granted will need a place too, so the total decides before any endpoint's count does.
function endpoints.flow_full(r)
  return r.limit > 0 and tonumber(redis.call('HGET', key.limits, r.flow) or 0) >= r.limit * pool.ready
end
function endpoints.count_flow(r, endpoint, change)
  if r.limit == 0 then return end
  local field = endpoint and r.flow .. '\31' .. endpoint or r.flow
  if redis.call('HINCRBY', key.limits, field, change) <= 0 then redis.call('HDEL', key.limits, field) end
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
end
local function forget_endpoints()
  changed_loads = {}
  if not remembered or loads_known > MOST_LOADS then
    loads, loads_known, window = {}, 0, nil
  elseif window_left ~= math.huge then
    window = nil
  end
end

-- include: writes
-- News for the replicas that own requests: durable in each one's inbox until taken, with a wake-up as a
-- hint. News for the calling replica goes home in the script's own reply instead of a wake-up.
local news = {}
function news.tell(owner, id, what)
  -- Only a live replica is granted anything; an inbox of one that is gone would never be emptied.
  if what == 'granted' or redis.call('ZSCORE', key.replicas, owner) then
    later('HSET', key.inbox[owner], id, what)
  end
  local mine = news.mine
  if owner == news.caller then
    mine[#mine + 1] = what .. ' ' .. id
  else
    local text = news.others[owner]
    news.others[owner] = (text and text .. '\n' or '') .. what .. ' ' .. id
  end
end
function news.forget(owner, id) later('HDEL', key.inbox[owner], id) end
function news.send()
  for owner, text in pairs(news.others) do redis.call('PUBLISH', key.wake(owner), text) end
end
local function forget_news(caller) news.caller, news.mine, news.others = caller, {}, {} end

-- include: queue endpoints news
-- The end of a request, whatever state it is in: everything it holds is given back, exactly once.
local function release(r)
  local list, limited = r.endpoints, r.limit > 0
  later('ZREM', key.inflight, r.id)
  pool.release(r.taken)
  if r.state == 'placed' then
    local endpoint = firsts[list] or endpoints.first(list)
    endpoints.release(endpoint)
    if limited then endpoints.count_flow(r, endpoint, -1) end
  else
    news.forget(r.owner, r.id)
  end
  if limited then endpoints.count_flow(r, nil, -1) end
end
local function finish_request(r, event, note_text)
  local state = r.state
  local ran = state == 'granted' or state == 'placed'
  if state == 'queued' then
    queue.remove(r)
  elseif state == 'held' then
    timers.stop(r.id)
  else
    release(r)
  end
  record.drop(r)
  workloads.ended(r.workload)
  pool.ended = pool.ended + 1
  if settings.log_max > 0 then log(event, r, nil, nil, note_text) end
  if ran and r.limit > 0 then
    for _, band in ipairs(BANDS) do queue.unpark(band, queue.lane(r)) end
  end
end
-- End a queued request that did not ask for it, and tell its owner.
local function turn_away(r, event)
  finish_request(r, event)
  news.tell(r.owner, r.id, event == 'expired' and 'expired' or 'evicted')
end

-- include: ending
-- What time brings due, the earliest first: a queued request becomes overdue, then expires; a held one is
-- given up.
local TIMERS_LIMIT = 24
local timed -- once a call is enough
local function run_timers(limit)
  timed = true
  if not timers.due() then return 0, 0 end
  local due = redis.call('ZRANGEBYSCORE', key.timers, '-inf', now_ms, 'WITHSCORES', 'LIMIT', 0, limit)
  local ran, expired = 0, 0
  for i = 1, #due, 2 do
    local id = due[i]
    local r = record.read(id)
    if r then
      ran = ran + 1
      if r.state == 'held' then
        finish_request(r, 'abandoned')
        expired = expired + 1
      elseif r.deadline_ms <= now_ms then
        turn_away(r, 'expired')
        expired = expired + 1
      else
        redis.call('ZADD', key.overdue, due[i + 1] * 1000 + r.arrived % 1000, id) -- of one ms, as they arrived
        timers.set(id, r.deadline_ms)
        pool.overdue = pool.overdue + 1
      end
    end
  end
  return ran, expired
end
local live -- owner -> whether it has been heard of lately, as this call knows it
local function is_live(owner)
  if live[owner] == nil then
    live[owner] = tonumber(redis.call('ZSCORE', key.replicas, owner) or 0) > now_ms - settings.silence_ms
  end
  return live[owner]
end
local GUARD_CREDIT = 1 - 1e-9 -- ten tenths are not quite one
local function grant(r, tag, take, turn_of)
  local id, share = r.id, queue.serve(r, tag, turn_of)
  r.state, r.taken, r.tag = 'granted', take, tag
  record.write(r)
  later('ZADD', key.inflight, now_ms + settings.lease_ms, id)
  local counters, guard_share = pool, settings.guard_share
  local credit = counters.credit
  if not turn_of then
    counters.guards = counters.guards + 1
    credit = credit - 1
  end
  -- No more than one is saved up; what a share that does not divide 1 adds past that counts for the next.
  counters.credit = credit < 1 and credit + guard_share or 1 + guard_share
  counters.stock, counters.dispatches = counters.stock + take, counters.dispatches + 1
  if r.limit > 0 then endpoints.count_flow(r, nil, 1) end
  workloads.dispatched(r.workload, (now_us - r.arrived) / 1000)
  news.tell(r.owner, id, 'granted')
  if settings.log_max > 0 then log('granted', r, tag, turn_of and 'turn' or 'guard', share) end
end
-- Serve the queue while there is room: stock below the lower bound, and never past the upper (G1).
-- A request past its TTL is not served (G5); one whose replica is silent is held for adoption (G7).
local DISPATCH_LIMIT = 24 -- the next call goes on; every one that frees room ends with a dispatch
local function dispatch()
  live = {}
  local served, attempts = 0, 0
  if not timed then run_timers(TIMERS_LIMIT) end
  if settings.paused == 1 then return 0, 0 end
  local counters, guarded = pool, settings.guard_share > 0
  local lower, upper = counters.lower, counters.upper
  local room = math.min(counters.queued, math.ceil(lower - counters.stock), DISPATCH_LIMIT)
  if room > 0 then
    -- As many as have ended are likely to fit; who costs more or less makes it a guess.
    queue.look_ahead(math.min(room, counters.ended - counters.ended_before))
  end
  while counters.queued > 0 and counters.stock < lower and attempts < DISPATCH_LIMIT do
    local id, tag, band, lane
    if guarded and counters.overdue > 0 and counters.credit >= GUARD_CREDIT then
      id, tag = queue.most_overdue()
    end
    if not id then id, tag, band, lane = queue.turn() end
    if not id then break end
    local r = known_records[id] or record.read(id)
    attempts = attempts + 1
    if lane and not (r and r.state == 'queued') then
      queue.drop_stray(id, band, lane, tag)
    elseif r.deadline_ms <= now_ms then
      turn_away(r, 'expired')
    elseif not (live[r.owner] or is_live(r.owner)) then
      queue.hold(r, now_ms + settings.lease_ms)
    elseif r.limit > 0 and endpoints.flow_full(r) then
      queue.park(r.band, queue.lane(r), tag)
    else
      local take = r.cost < upper and r.cost or upper
      if upper <= 0 or counters.stock + take > upper then break end
      grant(r, tag, take, lane)
      served = served + 1
    end
  end
  return served, attempts
end
local born, born_text -- of the last call
-- Every call that may change the queue ends here. Returns what each reply begins with:
-- the pool's birth, the caller's news, dispatch attempts and successes.
local function conclude(replies)
  local served, attempts = 0, 0
  if pool.known then served, attempts = dispatch() end
  ahead.save()
  record.save()
  workloads.save()
  pool.save()
  endpoints.save()
  send_all()
  send_log()
  news.send()
  if born ~= pool.born then born, born_text = pool.born, full(pool.born) end
  return {born_text, news.mine, attempts, served, unpack(replies or {})}
end
-- The batch form of a call: `answer(index, fields...)` for each `size` arguments after the caller's name, at
-- most four. An answer to fewer does not look at the others, which are the next one's.
local function batch(args, size, answer)
  forget_news(args[1])
  local replies, count = {}, 0
  for at = 2, #args, size do
    count = count + 1
    replies[count] = answer(at, args[at], args[at + 1], args[at + 2], args[at + 3])
  end
  return conclude(replies)
end
-- What a batch names in its n-th of every `size` arguments, and how many they are; '' is nobody. The table is
-- filled again by the next.
local column_found = {}
local function column(args, size, n)
  local found, count = column_found, 0
  for at = 1 + n, #args, size do
    local name = args[at]
    if name ~= '' then
      count = count + 1
      found[count] = name
    end
  end
  return found, count
end
local under_way = false -- also after a call that failed
local function begin(pool_key)
  use_builtins()
  local failed = under_way
  under_way = true
  use_keys(pool_key)
  forget_writes()
  forget_records()
  forget_lengths()
  forget_fronts()
  forget_log()
  timed = false
  read_clock()
  pool.read(failed)
  forget_endpoints()
  timers.forget()
  forget_workloads()
end
local function finish(reply)
  under_way = false
  return reply
end

do
-- include: dispatch
-- Renew the leases of requests seen alive. One whose record is lost (FLUSHALL, or a lease that ran out
-- while nobody could report) is taken back into the stock from the ticket it carries.
--
-- Guarantees: what reports itself is never reaped; the served endpoint is the one that is counted.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then for each request: id, attempt ('' when an access log reports it),
--   served endpoint ('' unknown), ticket ('' none): flow, band, weight, cost, workload, criticality,
--   model, endpoint, limit, joined by tabs; what follows is the replicas' own
-- Returns {born, news, attempts, served, reply...}:
--   'renewed' | 'restored' | 'waiting' (queued: not yet in flight) | 'unknown' (and not restored)
local RENEW_ITEM = 4
local TICKET = '^([^\t]*)\t([^\t]*)\t([^\t]*)\t([^\t]*)\t([^\t]*)\t([^\t]*)\t([^\t]*)\t([^\t]*)\t([^\t]*)'

local MOST = 1e12 -- sums of so much stay exact
local HIGHEST_LIMIT = 65535

-- What an access log tells may be anything: a ticket that is damaged restores nothing.
local function figure(text, most)
  local number = tonumber(text)
  return number and number >= 0 and number <= most and number or nil
end

local function is_address(text) return string.find(text, '^[^,%c]+$') end

local function restore(id, attempt, served, ticket)
  if string.find(ticket, '%z') then return 'unknown' end -- it would end a packed string early
  local flow, band, weight, cost, workload_id, criticality, model, endpoint, limit = string.match(ticket, TICKET)
  if not (pool.known and flow) then return 'unknown' end
  band, weight, cost = figure(band, 2), figure(weight, MOST), figure(cost, MOST)
  criticality, limit = figure(criticality, 5), figure(limit, HIGHEST_LIMIT)
  if is_address(served) then endpoint = served end
  if not (band and band % 1 == 0 and weight and cost and criticality and limit and limit % 1 == 0
    and is_address(endpoint)) then
    return 'unknown'
  end
  if redis.call('ZSCORE', key.buried, id) then return 'unknown' end
  local r = record.new(id)
  r.state, r.owner, r.attempt, r.flow, r.band, r.weight, r.cost, r.workload, r.criticality, r.model, r.arrived,
    r.deadline_ms, r.endpoints, r.limit, r.taken, r.tag = 'placed', news.caller, attempt, flow, band, weight, cost,
    workload_id, criticality, model, now_us, 0, endpoint, limit, cost, -1
  pool.stock = pool.stock + r.taken
  endpoints.reserve(r.endpoints)
  if r.limit > 0 then
    endpoints.count_flow(r, nil, 1)
    endpoints.count_flow(r, r.endpoints, 1)
  end
  workloads.restored(workload_id)
  later('ZADD', key.inflight, now_ms + settings.lease_ms, id)
  record.write(r)
  log('restored', r)
  return 'restored'
end

-- Envoy went on to a fallback: the count follows.
local function move(r, served)
  local old = endpoints.first(r.endpoints)
  if not is_address(served) or served == old then return end
  endpoints.release(old)
  endpoints.reserve(served)
  endpoints.count_flow(r, old, -1)
  endpoints.count_flow(r, served, 1)
  r.endpoints = served
  record.write(r)
  log('moved', r)
end

local function renew(args)
  record.prefetch(column(args, RENEW_ITEM, 1))
  return batch(args, RENEW_ITEM, function(_, id, attempt, served, ticket)
    local r = record.read(id)
    if not r then return restore(id, attempt, served, ticket) end
    if r.state == 'queued' or r.state == 'held' then return 'waiting' end
    later('ZADD', key.inflight, now_ms + settings.lease_ms, id)
    if r.state == 'placed' then move(r, served) end
    return 'renewed'
  end)
end
redis.register_function('renew_7a6e0baf', function(keys, args) begin(keys[1]) return finish(renew(args)) end)
end
-- include: pool
-- What a flow's answers cost on average, in tokens: the estimate for a request that sets no maximum.
local answers = {}
function answers.mean(flow)
  local text = redis.call('HGET', key.answers, flow)
  return text and struct.unpack('d', text) or settings.default_answer
end
function answers.learn(flow, tokens)
  local text = redis.call('HGET', key.answers, flow)
  local most = settings.max_workloads
  if not text and most and redis.call('HLEN', key.answers) >= most then return end
  local mean = text and struct.unpack('d', text)
  mean = mean and settings.answer_alpha * tokens + (1 - settings.answer_alpha) * mean or tokens
  redis.call('HSET', key.answers, flow, struct.pack('dd', mean, now_ms))
end
function answers.drop(flow) redis.call('HDEL', key.answers, flow) end
function answers.idle(text, idle_ms)
  local _, last_ms = struct.unpack('dd', text)
  return now_ms - last_ms > idle_ms
end

do
-- include: dispatch answers
-- Account for requests that have ended, whoever reports it: give back stock, endpoint and lease, correct
-- what their flow was charged, and dispatch what now fits. A queued one has lost its client and leaves.
--
-- Guarantees: each request is given back once; an unknown or repeated id changes nothing (G6).
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then for each request: id, outcome (completed, client_gone, upstream_failed),
--   its real cost ('' unknown), its answer's tokens ('' unknown)
-- Returns {born, news, attempts, served, reply...}: 'settled MODEL' | 'left MODEL' (was queued) | 'unknown'
local SETTLE_ITEM = 4
local settled -- model -> reply
local function correct_charge(r, actual)
  -- A bypass has no tag (-1) and charges nothing. A tag may be below 0: of what was charged under one policy, more may
  -- be given back under another.
  if r.tag == -1 or not actual or actual == r.cost then return end
  queue.charge_band(r, actual - r.cost)
  if settings.fairness ~= 'weighted-fair' then return end
  local share = queue.share(r)
  local change = (actual - r.cost) * share / r.cost
  log('corrected', r, queue.correct(r, queue.lane(r), change, r.tag + share), nil, change)
end
local hosts, workload_ids = {}, {} -- filled again by each call
local function settle(args)
  settled = settled or names_under('settled ')
  local ids, count = column(args, SETTLE_ITEM, 1)
  record.prefetch(ids, count)
  local placed, known = 0, 0
  for i = 1, count do
    local r = known_records[ids[i]]
    if r then
      if r.state == 'placed' then
        local list = r.endpoints
        placed = placed + 1
        hosts[placed] = firsts[list] or endpoints.first(list)
      end
      known = known + 1
      workload_ids[known] = r.workload
    end
  end
  endpoints.prefetch(hosts, placed)
  workloads.prefetch(workload_ids, known)
  return batch(args, SETTLE_ITEM, function(_, id, outcome, actual, answer_tokens)
    local r = known_records[id] or record.read(id)
    if not r then return 'unknown' end
    if r.state == 'queued' or r.state == 'held' then
      finish_request(r, 'cancelled')
      return 'left ' .. r.model
    end
    if actual ~= '' then correct_charge(r, tonumber(actual)) end
    if answer_tokens ~= '' then answers.learn(r.flow, tonumber(answer_tokens)) end
    finish_request(r, outcome)
    return settled[r.model]
  end)
end
redis.register_function('settle_7a6e0baf', function(keys, args) begin(keys[1]) return finish(settle(args)) end)
end
-- include: ending
-- Give r an endpoint: chosen and reserved in one step, so that two replicas never both take one for idle (G1).
-- Returns 'placed a,b,c LOADS', or nil and whether only the flow's limit stands in the way. The stock and the
-- flow's total are the caller's.
local function place_request(r, candidates, turn, picks)
  local picked, seen, endpoint = endpoints.pick(r, candidates, turn, picks)
  if not picked then return nil, seen end
  r.endpoints, r.state = picked, 'placed'
  endpoints.reserve(endpoint)
  if r.limit > 0 then endpoints.count_flow(r, endpoint, 1) end
  record.write(r)
  return 'placed ' .. picked .. ' ' .. seen
end
-- A granted request's place. Where its flow is at its limit on every endpoint it may have, it goes back to
-- its place in the queue, uncharged, and its lane waits until one of the flow's requests ends.
local function place_granted(r, candidates, turn, picks)
  news.forget(r.owner, r.id)
  local reply, limited = place_request(r, candidates, turn, picks)
  if reply then
    if settings.log_max > 0 then log('placed', r) end
    return reply
  end
  if not limited or r.deadline_ms <= now_ms then
    finish_request(r, limited and 'expired' or 'refused', limited and '' or 'no-endpoints')
    return limited and 'expired' or 'refused no-endpoints 1'
  end
  later('ZREM', key.inflight, r.id)
  pool.release(r.taken)
  endpoints.count_flow(r, nil, -1)
  r.state, r.taken = 'queued', 0
  queue.insert(r)
  local lane = queue.lane(r)
  local tag = queue.correct(r, lane, -queue.share(r), r.tag)
  queue.charge_band(r, -r.cost)
  record.write(r)
  log('requeued', r, tag)
  if redis.call('ZSCORE', ahead.anew(key.flows[r.band]), lane) then queue.park(r.band, lane, tag) end
  return 'queued ' .. (r.deadline_ms - now_ms)
end

do
-- include: placing dispatch answers
-- Admit a batch of arrivals: place at once (bypass), queue, or refuse; adopt what is already known.
--
-- Guarantees: stock never passes the upper bound (G1); an id that is known keeps its place, its grant or
-- its endpoint and changes its owner, so that repeating a call changes nothing (G6, G7).
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then each request, packed (app/state/arrival.py): texts, each ended by byte 0:
--   id, attempt, flow, workload ('' anonymous), model, candidates (as place has them); then doubles: band,
--   weight, cost, ttl_ms, age_ms, criticality, limit (of the flow, on each endpoint; 0 none), learn (1: cost
--   lacks the answer's part, which the flow's mean gives)
-- Returns {born, news, attempts, served, reply...}, one reply a request:
--   'placed a,b,c LOADS' (as place has them) | 'queued TTL_LEFT_MS' | 'refused REASON RETRY_AFTER_S' with
--   REASON one of no-endpoints, saturated, insufficient-flow-capacity, too-many-flows | 'expired'
--   | 'unknown-pool' (publish first); of a known id the first two end in ' adopted'.
--   One that is refused or expired leaves nothing by its id: sent twice it counts twice among its workload's
--   arrivals, and changes nothing else
local ARRIVAL = '<ssssssdddddddd'

local function adopt(r, attempt, candidates, turn, picks)
  local old_owner, old_attempt = r.owner, r.attempt
  r.owner, r.attempt = news.caller, attempt
  if r.state == 'queued' or r.state == 'held' then
    if r.deadline_ms <= now_ms then
      finish_request(r, 'expired')
      return 'expired'
    end
    local tag
    if r.state == 'held' then
      r.state = 'queued'
      tag = queue.insert(r)
    end
    record.write(r)
    log('adopted', r, tag)
    return 'queued ' .. (r.deadline_ms - now_ms) .. ' adopted'
  end
  log('adopted', r)
  later('ZADD', key.inflight, now_ms + settings.lease_ms, r.id)
  if r.state == 'placed' then
    -- Two streams know its endpoint, and which of them Envoy still listens to nobody can tell: a replica that has
    -- slept brings what was given up long ago. So neither can take it back; its end or its lease does.
    if old_owner ~= news.caller or old_attempt ~= attempt then r.attempt = '' end
    record.write(r)
    return 'placed ' .. r.endpoints .. ' adopted'
  end
  news.forget(old_owner, r.id)
  local reply = place_granted(r, candidates, turn, picks)
  return string.find(reply, '^[pq]') and reply .. ' adopted' or reply
end

local function refuse(r, reason)
  local retry_after_s = 1
  if reason ~= 'no-endpoints' and pool.rate > 0 then
    retry_after_s = math.max(1, math.min(60, math.ceil((pool.queued + 1) / pool.rate)))
  end
  log('refused', r, nil, nil, reason)
  return 'refused ' .. reason .. ' ' .. retry_after_s
end

-- Make room for a request of a higher band: the newest request of the least recently preempted lane of the
-- lowest band below (specs/003).
local function preempt_for(r)
  for band = 2, r.band + 1, -1 do
    local lane, newest
    if pool[QUEUED[band]] > 0 then lane, newest = victims.next(band) end
    if newest then
      pool.pressed = 1
      redis.call('ZADD', key.victims[band], pool.arrival(0), lane)
      turn_away(record.read(newest), 'preempted')
      return true
    end
  end
  return false
end

local function bypass(r, turn, picks)
  if settings.paused == 1 then return nil end
  local take = math.min(r.cost, pool.upper)
  if pool.stock + take > pool.upper or endpoints.flow_full(r) then return nil end
  r.taken = take
  local reply, limited = place_request(r, r.candidates, turn, picks)
  if not reply then
    r.taken = 0
    return not limited and refuse(r, 'no-endpoints') or nil
  end
  pool.stock = pool.stock + take
  if r.limit > 0 then endpoints.count_flow(r, nil, 1) end
  later('ZADD', key.inflight, now_ms + settings.lease_ms, r.id)
  workloads.dispatched(r.workload, r.age_ms)
  log('bypassed', r)
  return reply
end

-- Most have the same time to live, and a number made into text costs as much as half a command.
local last_left_ms, last_reply
local function queued_for(left_ms)
  if last_left_ms ~= left_ms then last_left_ms, last_reply = left_ms, 'queued ' .. left_ms end
  return last_reply
end

local function arrive(r, turn, picks)
  local left_ms = r.ttl_ms - r.age_ms
  if left_ms <= 0 then return 'expired' end
  if pool.ready == 0 then return refuse(r, 'no-endpoints') end
  r.deadline_ms = now_ms + left_ms
  local reply = pool.queued == 0 and bypass(r, turn, picks)
  if reply then return reply end
  if settings.overload == 'reject-noncritical' and r.band > 0 then return refuse(r, 'saturated') end
  if settings.fairness ~= 'none' and queue.length(r.band, r.flow) >= settings.flow_capacity then
    return refuse(r, 'insufficient-flow-capacity')
  end
  if pool.queued >= settings.total_capacity and not (settings.overload == 'preempt' and preempt_for(r)) then
    return refuse(r, 'too-many-flows')
  end
  r.state = 'queued'
  local tag = queue.insert(r)
  record.write(r)
  if settings.log_max > 0 then log('queued', r, tag) end
  return queued_for(left_ms)
end

local asked, ids, workload_ids = {}, {}, {} -- filled again by each call
local function admit(args)
  local count = #args - 1
  if not pool.known then
    local replies = {}
    for i = 1, count do replies[i] = 'unknown-pool' end
    return {'0', {}, 0, 0, unpack(replies)}
  end
  forget_news(args[1])
  local replies = {}
  for i = 1, count do
    local r = record.new('')
    r.id, r.attempt, r.flow, r.workload, r.model, r.candidates, r.band, r.weight, r.cost, r.ttl_ms, r.age_ms,
      r.criticality, r.limit, r.learn = struct.unpack(ARRIVAL, args[i + 1])
    asked[i], ids[i], workload_ids[i] = r, r.id, r.workload
  end
  record.prefetch(ids, count)
  workloads.prefetch(workload_ids, count)
  for i = 1, count do
    local r, turn = asked[i], now_us + i + 1
    local known = known_records[r.id] or record.read(r.id)
    if known then
      replies[i] = adopt(known, r.attempt, r.candidates, turn, count)
    else
      -- Its workload counts it before anything is decided, so that requests which are turned away count in
      -- the rate, too (specs/000, 001).
      r.state, r.owner, r.workload, r.arrived, r.deadline_ms, r.endpoints, r.taken, r.tag = 'new', args[1],
        workloads.arrived(r.workload), pool.arrival(r.age_ms), 0, '', 0, -1
      r.age_ms = math.floor(r.age_ms)
      if r.learn == 1 then r.cost = r.cost + answers.mean(r.flow) end
      replies[i] = arrive(r, turn, count)
      if r.state == 'new' then workloads.turned_away(r.workload) end -- refused, expired
    end
  end
  return conclude(replies)
end
redis.register_function('admit_7a6e0baf', function(keys, args) begin(keys[1]) return finish(admit(args)) end)
end
do
-- include: placing dispatch
-- Choose and reserve an endpoint for each granted request of a batch.
--
-- Guarantees: load is read and reserved in one step, so two replicas never both take an endpoint for
-- idle; repeating a call returns the same endpoint (G6).
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then for each request: id, attempt, candidates ('*', 'a,b,c' or 'a=0.7,b=0.5')
-- Returns {born, news, attempts, served, reply...}, one reply a request:
--   'placed a,b,c LOADS' (requests in flight as they were: of the candidates named, '' where one could not
--   have it; for '*', of a,b,c; without LOADS if it was placed before)
--   | 'queued TTL_LEFT_MS' (back in its place: its flow is at its limit wherever it may go)
--   | 'refused no-endpoints RETRY_AFTER_S' or 'expired' (and ended) | 'gone' (no grant of this owner)
local PLACE_ITEM = 3
local function place(args)
  record.prefetch(column(args, PLACE_ITEM, 1))
  local picks = (#args - 1) / PLACE_ITEM
  return batch(args, PLACE_ITEM, function(at, id, attempt, candidates)
    local r = known_records[id] or record.read(id)
    if not r or r.owner ~= news.caller or r.attempt ~= attempt then return 'gone' end
    if r.state == 'placed' then return 'placed ' .. r.endpoints end
    if r.state ~= 'granted' then return 'gone' end
    return place_granted(r, candidates, now_us + at, picks)
  end)
end
redis.register_function('place_7a6e0baf', function(keys, args) begin(keys[1]) return finish(place(args)) end)
end
do
-- include: dispatch
-- A replica says that it lives, and learns what it must know: whether the shared state is the one it
-- knew, who publishes, the bounds, and the news that a lost wake-up may have left in its inbox.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica
-- args[2] JSON it gives of itself
-- args[3] silence_ms: a replica that has been silent for so long is gone, as it is for dispatch and sweep
-- Returns {born, news, attempts, served, was_known (0: it was away or is new), leader (1: it publishes),
--   live replicas, config version, endpoints version ('VERSION+MARKS' once there were marks), tuned version,
--   stock, queued, upper, lower, ready, paused (0 or 1)}; numbers as strings where they may have fractions
-- Bounded, since a replica may have any number of requests that end at once.
local NEWS_LIMIT = 256 -- of more, some now and the others at the next heartbeats
local function news_in(inbox)
  if redis.call('HLEN', inbox) <= NEWS_LIMIT then return redis.call('HGETALL', inbox) end
  return redis.call('HRANDFIELD', inbox, NEWS_LIMIT, 'WITHVALUES')
end
local function heartbeat(args)
  local owner, about, silence_ms = args[1], args[2], tonumber(args[3])
  forget_news(owner)
  local last = tonumber(redis.call('ZSCORE', key.replicas, owner) or 0)
  local was_known = last > now_ms - silence_ms and 1 or 0
  redis.call('ZADD', key.replicas, now_ms, owner)
  redis.call('HSET', key.about, owner, about)
  -- A sweep may have begun on what it queued before; the next silence is walked from the start.
  if was_known == 0 then redis.call('HDEL', key.orphans, owner) end
  local others = redis.call('ZRANGEBYSCORE', key.replicas, '(' .. (now_ms - silence_ms), '+inf')
  local leader = 1
  for _, other in ipairs(others) do
    if other < owner then leader = 0 end
  end
  local versions = redis.call('HMGET', key.pool, 'config_version', 'endpoints_version', 'tuned_version',
    'marks_version')
  local inbox, left = news_in(key.inbox[owner]), {}
  for i = 1, #inbox, 2 do
    left[#left + 1] = inbox[i + 1] .. ' ' .. inbox[i]
    -- A grant stays until place takes it; an ending has no other trace and is told once.
    if inbox[i + 1] ~= 'granted' then later('HDEL', key.inbox[owner], inbox[i]) end
  end
  local head = conclude()
  for _, item in ipairs(head[2]) do left[#left + 1] = item end
  return {
    head[1], left, head[3], head[4], was_known, leader, #others, versions[1] or '',
    (versions[2] or '') .. (versions[4] and '+' .. versions[4] or ''),
    versions[3] or '', full(pool.stock), pool.queued, full(pool.upper), full(pool.lower), pool.ready,
    settings.paused or 0,
  }
end
redis.register_function('heartbeat_7a6e0baf', function(keys, args) begin(keys[1]) return finish(heartbeat(args)) end)
end
-- include: dispatch
-- Settings in force: what the configuration gives, overlaid by what was changed live.
local function put_settings(base, overrides)
  local changed = false
  for name, value in pairs(overrides) do base[name] = value end
  -- What decides where a waiting request stands: those that wait are filed anew, by the sweep, in chunks.
  for _, name in ipairs({'fairness', 'ordering', 'wait_signal', 'wait_weight', 'criticality_weight', 'rate_weight',
    'wait_cap_ms', 'rate_cap'}) do
    changed = changed or settings[name] ~= base[name]
  end
  local text = cjson.encode(base)
  if base.log_max == 0 then log_change('tuned', text) end -- the last entry says that there will be no more
  settings, settings_text = base, nil
  redis.call('HSET', key.pool, 'settings', text)
  if changed and pool.queued > 0 then
    pool.refiling = 1
    redis.call('HSET', key.pool, 'walk', '0')
  end
  log_change('tuned', text)
end

do
-- include: settings
-- Set what the fleet shares by decision rather than by counting: settings and endpoints. The first call
-- brings the pool into being; what now fits is dispatched.
--
-- Guarantees: an endpoint that leaves keeps its count until its last request ends.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica
-- args[2] config version      args[3] endpoints version
-- args[4] settings: JSON, named as docs/redis-schema.md lists them
-- then pairs: endpoint, JSON {labels, draining}
-- Returns {born, news, attempts, served, upper, lower, ready}; bounds as strings
local FIRST_ENDPOINT = 5
local function publish(args)
  forget_news(args[1])
  local wanted, ready, marked, addresses = {}, 0, endpoints.marked(), {}
  for at = FIRST_ENDPOINT, #args, 2 do addresses[#addresses + 1] = args[at] end
  endpoints.prefetch(addresses, #addresses)
  local known = redis.call('HGETALL', key.endpoints)
  local former = {}
  for i = 1, #known, 2 do former[known[i]] = known[i + 1] end
  for at = FIRST_ENDPOINT, #args, 2 do
    local address, about = args[at], args[at + 1]
    local draining = endpoints.is_draining(about) or marked[address]
    wanted[address] = true
    if not draining then ready = ready + 1 end
    if former[address] ~= about then later('HSET', key.endpoints, address, about) end
    endpoints.list(address, draining)
  end
  send(key.endpoints)
  for i = 1, #known, 2 do
    local address = known[i]
    if not wanted[address] then
      redis.call('HDEL', key.endpoints, address)
      endpoints.forget_marks(address)
      endpoints.unlist(address)
    end
  end
  if not pool.known then
    pool.born = now_us
    pool.credit = 1
    pool.known = true
  end
  local overrides = redis.call('HGET', key.pool, 'overrides')
  redis.call('HSET', key.pool, 'config_version', args[2], 'endpoints_version', args[3], 'base', args[4])
  put_settings(cjson.decode(args[4]), overrides and cjson.decode(overrides) or {})
  pool.ready = ready
  pool.bound()
  local head = conclude()
  head[5], head[6], head[7] = full(pool.upper), full(pool.lower), ready
  return head
end
redis.register_function('publish_7a6e0baf', function(keys, args) begin(keys[1]) return finish(publish(args)) end)
end
do
-- include: dispatch answers
-- Find what nobody will report: expired requests, leases that ran out, replicas that fell silent,
-- workloads gone idle; and walk the waiting requests whose order time or a new policy has changed. Any
-- replica may call it at any time.
--
-- Guarantees: runs at most once an interval, whoever calls; a bounded amount of work a call; a call that
-- left work behind says so, and may be repeated at once.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica
-- args[2] interval_ms   args[3] grace_ms: a silent replica's queued requests wait this long for adoption
-- args[4] idle_ms: a workload is forgotten after
-- Returns {born, news, attempts, served, ran (0 or 1), expired, reclaimed, more (0 or 1)}
local CHUNK = 32 -- requests that a call ends, holds or looks at, at most
local REFILED = 16 -- and how many it files anew: each of them leaves one order and enters another
local LIGHT = 500 -- entries of what is merely forgotten
local WALKS = 150 -- calls an interval that go on with the walk, at most
local DOWN_MS = 10000
local MOST_IDLE_LANES = 10000 -- of a band, whose finish tags, and when they were preempted, are kept
local PRESSED = 0.9 -- of the capacity: below it the memory of who was preempted ends

local function reap(most)
  local ids = redis.call('ZRANGEBYSCORE', key.inflight, '-inf', now_ms, 'LIMIT', 0, most)
  record.prefetch(ids, #ids)
  for _, id in ipairs(ids) do finish_request(record.read(id), 'reclaimed') end
  return #ids
end

-- A silent replica's queued requests, found by a walk over all, a chunk a call. What comes behind the walk's
-- back is held by dispatch when its turn comes, or ends with its TTL.
local function hold_orphans(grace_ms, most)
  local silent = redis.call('ZRANGEBYSCORE', key.replicas, '-inf', now_ms - settings.silence_ms, 'LIMIT', 0, 1)[1]
  if not silent then return false end
  local scan = redis.call('HSCAN', key.requests, redis.call('HGET', key.orphans, silent) or '0', 'COUNT', most)
  for i = 1, #scan[2], 2 do
    local r = record.meet(scan[2][i], scan[2][i + 1])
    if r and r.owner == silent and r.state == 'queued' then queue.hold(r, now_ms + grace_ms) end
  end
  if scan[1] ~= '0' then
    redis.call('HSET', key.orphans, silent, scan[1])
    return true
  end
  redis.call('ZREM', key.replicas, silent)
  redis.call('HDEL', key.about, silent)
  redis.call('HDEL', key.orphans, silent)
  send(key.inbox[silent]) -- what this call has told it goes too
  redis.call('DEL', key.inbox[silent])
  return false
end

local function forget_idle(hash, cursor, kind, idle_ms)
  local scan = redis.call('HSCAN', hash, cursor, 'COUNT', 2 * CHUNK)
  for i = 1, #scan[2], 2 do
    if kind.idle(scan[2][i + 1], idle_ms) then kind.drop(scan[2][i]) end
  end
  return scan[1]
end

-- A stretch of the walk over all requests. Returns where it stands; '0' when it is through.
local function walk(cursor, most)
  if pool.refiling == 1 then most = math.min(most, REFILED) end
  local scan = redis.call('HSCAN', key.requests, cursor, 'COUNT', most)
  for i = 1, #scan[2], 2 do
    local r = record.meet(scan[2][i], scan[2][i + 1])
    if r and r.state == 'queued' then
      if pool.refiling == 1 then
        queue.refile(r)
      else
        order.refresh(r, queue.lane(r))
      end
    end
  end
  if scan[1] == '0' then pool.refiling = 0 end
  return scan[1]
end

-- How fast the queue drains, for Retry-After.
local function measure_rate(swept_ms, dispatches)
  if swept_ms == 0 or now_ms == swept_ms then return end
  local rate = (pool.dispatches - dispatches) * 1000 / (now_ms - swept_ms)
  pool.rate = pool.rate == 0 and rate or (pool.rate + rate) / 2
end

-- Whether more is due than one call forgets.
local function forget_buried()
  local due = redis.call('ZRANGEBYSCORE', key.buried, '-inf', now_ms, 'LIMIT', 0, LIGHT)
  if #due > 0 then redis.call('ZREM', key.buried, unpack(due)) end
  return #due == LIGHT
end

-- At rest no lane has a claim: tags start anew from the highest, and finish tags at or below v say nothing.
local function age_tags(band)
  local v = pool[V[band]]
  send(key.finish[band])
  if pool.queued == 0 and pool.stock == 0 then
    local top = redis.call('ZRANGE', key.finish[band], -1, -1, 'WITHSCORES')
    if top[2] then v = math.max(v, tonumber(top[2])) end
    pool[V[band]] = v
  end
  -- Not all at once: a million of them would hold everyone up.
  local stale = redis.call('ZRANGEBYSCORE', key.finish[band], '-inf', v, 'LIMIT', 0, LIGHT)
  if #stale > 0 then redis.call('ZREM', key.finish[band], unpack(stale)) end
  -- A client with a new flow for each request keeps v where it is. What is forgotten is what is owed least: at
  -- most one charge of a flow that has nothing waiting.
  local surplus = math.min(redis.call('ZCARD', key.finish[band]) - MOST_IDLE_LANES, LIGHT)
  if surplus > 0 then redis.call('ZREMRANGEBYRANK', key.finish[band], 0, surplus - 1) end
  local memories = math.min(redis.call('ZCARD', key.preempted[band]) - MOST_IDLE_LANES, LIGHT)
  if memories > 0 then redis.call('ZREMRANGEBYRANK', key.preempted[band], 0, memories - 1) end
  return #stale == LIGHT or surplus == LIGHT or memories == LIGHT
end

local function sweep(args)
  local owner, interval_ms, grace_ms, idle_ms = args[1], tonumber(args[2]), tonumber(args[3]), tonumber(args[4])
  forget_news(owner)
  local state = redis.call('HMGET', key.pool, 'swept_ms', 'sweep_more', 'workload_cursor', 'answer_cursor', 'walk',
    'walks', 'swept_dispatches')
  local swept_ms = tonumber(state[1] or 0)
  local fresh = now_ms - swept_ms >= interval_ms
  if not pool.known or not (fresh or state[2] == '1') then
    return {full(pool.born), {}, 0, 0, 0, 0, 0, 0}
  end
  local more = false
  local ran, expired = run_timers(CHUNK)
  local reaped = ran < CHUNK and reap(CHUNK - ran) or 0
  local left = CHUNK - ran - reaped
  if left == 0 or hold_orphans(grace_ms, left) then more = true end
  local walks = fresh and 0 or tonumber(state[6] or 0)
  local walked = state[5] or '0'
  if pool.refiling == 1 or (settings.ordering == 'workload-aware' and (fresh or walked ~= '0')) then
    if left > 0 then walked, walks = walk(walked, left), walks + 1 end
    if walked ~= '0' and (pool.refiling == 1 or walks < WALKS) then more = true end
  end
  for _, band in ipairs(BANDS) do
    for _, lane in ipairs(redis.call('ZRANGE', key.parked[band], 0, CHUNK - 1)) do queue.unpark(band, lane) end
    if age_tags(band) then more = true end
  end
  if forget_buried() then more = true end
  if pool.pressed == 1 and pool.queued < PRESSED * settings.total_capacity then
    if victims.relax(LIGHT) then more = true else pool.pressed = 0 end
  end
  if fresh then
    endpoints.lapse(DOWN_MS)
    victims.complete(LIGHT)
    measure_rate(swept_ms, tonumber(state[7] or 0))
    redis.call('HSET', key.pool, 'swept_ms', now_ms, 'swept_dispatches', pool.dispatches)
  end
  redis.call('HSET', key.pool, 'sweep_more', more and 1 or 0, 'walk', walked, 'walks', walks,
    'workload_cursor', forget_idle(key.workloads, state[3] or '0', workloads, idle_ms),
    'answer_cursor', forget_idle(key.answers, state[4] or '0', answers, idle_ms))
  local head = conclude()
  head[5], head[6], head[7], head[8] = 1, expired, reaped, more and 1 or 0
  return head
end
redis.register_function('sweep_7a6e0baf', function(keys, args) begin(keys[1]) return finish(sweep(args)) end)
end
