-- include: keys writes
-- One request, packed. state: queued, held (its replica is silent), granted, placed. Fields hold no control
-- characters (replicas refuse them), so none can end a string early. Each is read once a call.
local record = {}
local RECORD = 'ssssBddsBsddsddd'
local known_records = {} -- what this call has read: false if there is none
-- A record outlives its call: what Redis holds is unpacked only where it is not what was last read or written
-- under that id (`text`; equal strings are one in Lua). So whoever changes a record writes it or drops it. There
-- are hardly more than MOST_RECORDS tables, used in turn: a new one of this size costs more than a command.
local MOST_RECORDS = 2000
local held_records, spare, made, oldest = {}, {}, {}, 0 -- id -> record; tables of nobody, and all there are
local left_over = {} -- tables that may be nobody's when this call has ended
local call_number = 0
local function spare_table()
  local count = #spare
  local r = spare[count]
  if r then
    spare[count] = nil
    return r
  end
  count = #made
  for _ = 1, count < MOST_RECORDS and 0 or count do
    oldest = oldest % count + 1
    r = made[oldest]
    if r.call ~= call_number then
      held_records[r.id] = nil
      return r
    end
  end
  r = {}
  made[count + 1] = r
  return r
end
function record.new(id)
  local r = spare_table()
  left_over[#left_over + 1] = r
  r.id, r.due_ms, r.text, r.call = id, false, nil, call_number
  return r
end
local function parse_record(id, text)
  if not text then
    known_records[id] = false
    return nil
  end
  local r = held_records[id]
  if not r then
    r = spare_table()
    r.id, held_records[id] = id, r
  end
  if r.text ~= text then
    r.text, r.state, r.owner, r.attempt, r.flow, r.band, r.weight, r.cost, r.workload, r.criticality, r.model,
      r.arrived, r.deadline_ms, r.endpoints, r.limit, r.taken, r.tag = text, struct.unpack(RECORD, text)
  end
  r.due_ms, r.call = false, call_number
  known_records[id] = r
  return r
end
-- Read the records that a batch names in one go.
function record.prefetch(ids)
  if #ids == 0 then return end
  local texts = redis.call('HMGET', key.requests, unpack(ids))
  for i = 1, #ids do
    if known_records[ids[i]] == nil then parse_record(ids[i], texts[i]) end
  end
end
function record.read(id)
  local r = known_records[id]
  if r ~= nil then return r or nil end
  return parse_record(id, redis.call('HGET', key.requests, id))
end
-- A record that a scan has come upon.
function record.meet(id, text)
  local r = known_records[id]
  if r == nil then return parse_record(id, text) end
  return r or nil
end
function record.write(r)
  local id = r.id
  local text = struct.pack(RECORD, r.state, r.owner, r.attempt, r.flow, r.band, r.weight, r.cost, r.workload,
    r.criticality, r.model, r.arrived, r.deadline_ms, r.endpoints, r.limit, r.taken, r.tag)
  r.text, known_records[id], held_records[id] = text, r, r
  later('HSET', key.requests, id, text)
end
function record.drop(r)
  local id = r.id
  known_records[id], held_records[id] = false, nil
  left_over[#left_over + 1] = r
  later('HDEL', key.requests, id)
end
-- A new call begins; of one that `failed` nobody knows how far its changes got.
local function forget_records(failed)
  known_records, call_number = {}, call_number + 1
  if failed then
    held_records, spare, made, left_over = {}, {}, {}, {}
    return
  end
  for i = 1, #left_over do
    local r = left_over[i]
    if r.id and held_records[r.id] ~= r then
      r.id = false
      spare[#spare + 1] = r
    end
    left_over[i] = nil
  end
end
