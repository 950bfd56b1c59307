-- include: keys clock writes
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
local function fill(r, number, text)
  r.state, number, r.owner, r.attempt, r.flow, r.band, r.weight, r.cost, r.workload, r.criticality, r.model,
    r.arrived, r.deadline_ms, r.limit, r.endpoints, r.taken, r.tag = STATES[number],
    struct.unpack(LAYOUTS[number], text)
  if number < 3 then r.endpoints, r.taken, r.tag = '', 0, -1 end
end
local changed_ids, changed_count = {}, 0 -- what `save` writes
-- A table is found as `record.new` finds it, without the call: this is done for each request at each step. One that
-- can't be read, or has a band that there is not, is a stray: dropped as if it were not there.
local function parse_record(id, text)
  records_used = records_used + 1
  local r = record_tables[records_used]
  if not r then
    r = {}
    record_tables[records_used] = r
  end
  r.id, r.due_ms = id, false
  if not (pcall(fill, r, string.byte(text), text) and r.band < 3) then
    strays, changed_count = strays + 1, changed_count + 1
    known_records[id], changed_ids[changed_count] = false, id
    later('ZADD', key.unheard, now_ms, id) -- it may run
    return nil
  end
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
-- One that came back by its ticket; every other has a deadline.
record.NO_DEADLINE = 0
function record.is_restored(r) return r.deadline_ms == record.NO_DEADLINE end
-- Both are done at the end of the call, once for each id: what is then known of it is what is written.
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
local KEPT = 16 -- of more, the table is not cleared but left
local function forget_records()
  local count = 0
  for id in pairs(known_records) do
    known_records[id], count = nil, count + 1
  end
  if count > KEPT then known_records = {} end
  if records_used > 1000 then record_tables = {} end
  records_used, changed_count = 0, 0
end
