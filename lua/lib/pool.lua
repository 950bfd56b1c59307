-- include: keys clock writes
-- The pool's counters, read once a call and written once if they changed: doubles in a fixed order, packed,
-- which costs a tenth of as many fields. And its settings, decoded anew only when they have changed.
local pool = {}
local COUNTERS = {
  'born', 'stock', 'queued', 'seq', 'dispatches', 'guards', 'ended', 'log_seq', 'queued:0', 'queued:1', 'queued:2',
  'ready', 'upper', 'lower', 'v:0', 'v:1', 'v:2', 'band:0', 'band:1', 'band:2', 'bv', 'credit', 'overdue',
  'rate', 'refiling', 'pressed', 'new:0', 'new:1', 'new:2',
}
-- Those that each band has, by band: a number made into text costs as much as a command.
local QUEUED = {[0] = 'queued:0', 'queued:1', 'queued:2'}
local V = {[0] = 'v:0', 'v:1', 'v:2'}
local NEW = {[0] = 'new:0', 'new:1', 'new:2'}
local BAND_TAG = {[0] = 'band:0', 'band:1', 'band:2'}
local counters_text, saved = nil, {} -- as they were last read or saved: packed, and in their order
local COUNTERS_FORMAT -- made at the first call: a library being loaded has no `string`
local settings, settings_text -- of the last call; a library outlives its calls
local NO_SETTINGS = {
  total_capacity = 0, flow_capacity = 0, lease_ms = 0, silence_ms = 0, fallbacks = 0, log_max = 0,
  window_ms = 60000, ema_alpha = 0.2, guard_share = 0, starvation_ms = 0, ordering = 'fcfs', weights = {},
}
-- Counters are only ever added at the end. A version that has fewer writes fewer; what it left out is 0.
local function whole(text)
  local missing = 8 * #COUNTERS - #text
  return missing > 0 and text .. string.rep('\0', missing) or text
end
local function read_pool(failed)
  COUNTERS_FORMAT = COUNTERS_FORMAT or string.rep('d', #COUNTERS)
  local v = redis.call('HMGET', key.pool, 'counters', 'settings')
  -- Settings come with publish: without them nothing may be admitted.
  pool.known = v[1] and true or false
  if failed or not v[1] or v[1] ~= counters_text then
    local text = v[1] and whole(v[1])
    local numbers = text and {struct.unpack(COUNTERS_FORMAT, text)} or {}
    for i = 1, #COUNTERS do pool[COUNTERS[i]] = numbers[i] or 0 end
    counters_text, saved = v[1], text == v[1] and numbers or {} -- what lacks some is written anew
  end
  pool.ended_before = pool.ended
  if not v[2] then
    settings, settings_text = NO_SETTINGS, nil
  elseif v[2] ~= settings_text then
    settings, settings_text = cjson.decode(v[2]), v[2]
  end
end
function pool.save()
  if not pool.known then return end
  local counters, names, values, changed = pool, COUNTERS, saved, false
  for i = 1, #names do
    local number = counters[names[i]]
    if number ~= values[i] then values[i], changed = number, true end
  end
  if not changed then return end
  counters_text = struct.pack(COUNTERS_FORMAT, unpack(values, 1, #names))
  redis.call('HSET', key.pool, 'counters', counters_text)
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
