-- include: keys writes
-- One request, packed. state: queued, held (its replica is silent), granted, placed. Fields hold no control
-- characters (replicas refuse them), so none can end a string early. Each is read once a call.
local record = {}
local RECORD = 'ssssBddsBsddsdddd'
local known_records = {}
local function parse_record(id, text)
  if not text then
    known_records[id] = false
    return nil
  end
  local r = {id = id}
  r.state, r.owner, r.attempt, r.flow, r.band, r.weight, r.cost, r.workload, r.criticality, r.model, r.arrived,
    r.deadline_ms, r.endpoints, r.granted_us, r.limit, r.taken, r.tag = struct.unpack(RECORD, text)
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
  known_records[r.id] = r
  writes.hash(key.requests, r.id, struct.pack(RECORD, r.state, r.owner, r.attempt, r.flow, r.band, r.weight,
    r.cost, r.workload, r.criticality, r.model, r.arrived, r.deadline_ms, r.endpoints, r.granted_us, r.limit,
    r.taken, r.tag))
end
function record.drop(r)
  known_records[r.id] = false
  writes.hash(key.requests, r.id, false)
end
local function forget_records() known_records = {} end
