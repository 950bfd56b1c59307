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
-- Whoever changes settings, endpoints, their loads or the clock changes a counter too (`pool.touched`), but for the
-- version before. So a call that finds the counters as its library left them knows the rest, and reads no more.
-- Whether what former calls left in memory is still so: nobody else has changed the counters since, or published
-- endpoints, as each call does that changes what may be remembered. Not for long: a primary that was none for a while
-- has missed more. And not beside a version whose calls may change an endpoint's load alone.
local remembered
local BESIDE_MS = 3600000 -- such a version may be about for so long after it was last seen
local REMEMBERED_MS = 1000
do -- a chunk may have 200 locals
  local COUNTERS = {
    'born', 'stock', 'queued', 'seq', 'dispatches', 'guards', 'ended', 'log_seq', 'queued:0', 'queued:1', 'queued:2',
    'ready', 'upper', 'lower', 'v:0', 'v:1', 'v:2', 'band:0', 'band:1', 'band:2', 'bv', 'credit', 'overdue',
    'rate', 'refiling', 'pressed', 'new:0', 'new:1', 'new:2', 'moved', 'older_ms',
  }
  local counters_text, saved = nil, {} -- as they were last read or saved: packed, and in their order
  local unsaved = false -- packed, but not yet written
  local MOVED = #COUNTERS - 1
  -- The first of them change with each request, the others seldom: those stay packed while they do not.
  local BUSY = 8
  local calm_text
  local BUSY_FORMAT, CALM_FORMAT -- made at the first call: a library being loaded has no `string`
  local called_ms, endpoints_version, read_key = 0, nil, nil
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
    local text, settings_now, endpoints_now, clock_text, same
    if key == read_key and counters_text and settings_text and not failed
      and (pool.older_ms == 0 or not pool.is_mixed()) then
      text = redis.call('HGET', key.pool, 'counters')
      same = text == counters_text
    end
    if same then
      settings_now, endpoints_now = settings_text, endpoints_version
    else
      text, settings_now, endpoints_now, clock_text =
        unpack(redis.call('HMGET', key.pool, 'counters', 'settings', 'endpoints_version', 'clock'))
      same = not failed and text and text == counters_text
    end
    -- Settings come with publish: without them nothing may be admitted.
    pool.known, read_key = text and true or false, key
    steady_clock(same, clock_text)
    if not same then
      local all = text and whole(text)
      local numbers = all and {struct.unpack(BUSY_FORMAT .. CALM_FORMAT, all)} or {}
      for i = 1, #COUNTERS do pool[COUNTERS[i]] = numbers[i] or 0 end
      -- Doubles never end in byte 31, which ends the numbers of a server without `struct`.
      if all ~= text and string.byte(text or '\31', -1) ~= 31 then pool.older_ms = now_ms end
      counters_text, saved = text, all == text and numbers or {} -- what lacks some is written anew
      calm_text = all and string.sub(all, 8 * BUSY + 1)
    end
    remembered = same and endpoints_now == endpoints_version and now_ms - called_ms < REMEMBERED_MS
      and (pool.older_ms == 0 or not pool.is_mixed())
    called_ms, endpoints_version, unsaved = now_ms, endpoints_now, false
    if text ~= key.counters then
      key.counters = text
      pool.may_lack()
    end
    pool.ended_before, pool.touched = pool.ended, false
    if not settings_now then
      settings, settings_text = NO_SETTINGS, nil
    elseif settings_now ~= settings_text then
      settings, settings_text = cjson.decode(settings_now), settings_now
    end
  end
  -- Whether a version that writes fewer counters has been at work lately.
  function pool.is_mixed() return pool.older_ms > 0 and now_ms - pool.older_ms < BESIDE_MS end
  function pool.save()
    if not pool.known then return end
    local counters, names, values, changed = pool, COUNTERS, saved, 0
    for i = 1, #names do
      local number = counters[names[i]]
      if number ~= values[i] then values[i], changed = number, i end
    end
    if changed == 0 and pool.touched and not unsaved then -- what others remember of these is so no longer
      counters.moved, changed = counters.moved + 1, MOVED
      values[MOVED] = counters.moved
    end
    pool.touched = false -- once, however often this is repeated
    local clock_text = clock_change()
    if changed == 0 and not unsaved then
      if not clock_text then return end
      counters.moved, changed = counters.moved + 1, MOVED
      values[MOVED] = counters.moved
    end
    unsaved = true
    if changed > BUSY then calm_text = struct.pack(CALM_FORMAT, unpack(values, BUSY + 1, #names)) end
    counters_text = struct.pack(BUSY_FORMAT, unpack(values, 1, BUSY)) .. calm_text
    if clock_text then
      redis.call('HSET', key.pool, 'counters', counters_text, 'clock', clock_text)
    else
      redis.call('HSET', key.pool, 'counters', counters_text)
    end
    unsaved, key.counters = false, counters_text
  end
end
-- Whether records may be missing of requests that run: where this server has not made the last change to the pool
-- itself (it was lost, restarted, or a replica until now), or a replica has come back. Then all that runs is told
-- again, at the latest by its next sign of life.
local LONGER_MS = 10000 -- than a lease: no journal brings back what is silent for as long (admission/outbox.py)
function pool.may_lack() key.lacks_ms = now_ms end
function pool.lacks() return now_ms - key.lacks_ms < settings.lease_ms + LONGER_MS end
-- Give back what a request took. Sums of fractions leave a residue, which must not pass for a request.
local RESIDUE = 1e-6
function pool.release(taken)
  local left = pool.stock - taken
  pool.stock = left > RESIDUE and left or 0
end
-- What a request of `cost` takes of a stock of `most`: a claim of tokens costs its client nothing, so that it takes a
-- part of the bound and no more. With the queue switched off nothing is taken: requests are placed as they come.
function pool.share(cost, most)
  if settings.queue_enabled == 0 then return 0 end
  most = most * (settings.claim_share or 1)
  return cost < most and cost or most
end
-- Bounds follow the number of ready backends. Nine digits undo binary rounding: 20 at 1.15 are 23, not 22.999….
function pool.bound()
  local function scaled(bound) return tonumber(string.format('%.9g', bound * pool.ready)) end
  pool.upper = scaled(settings.upper_per)
  pool.lower = math.max(scaled(settings.lower_per), 1e-9) -- at 0 an empty pool still takes one
end
-- The most that one request may take: the bound, also while some endpoints are not ready.
function pool.most()
  return math.max(pool.upper, settings.upper_per * math.max(redis.call('HLEN', key.endpoints), 1))
end
-- A number no earlier arrival has had, which is also the arrival time in us: it orders a lane.
function pool.arrival(age_ms)
  if age_ms > 0 then return math.floor(now_us - age_ms * 1000 + 0.5) end
  local seq = pool.seq + 1
  if seq < now_us then seq = now_us end
  pool.seq = seq
  return seq
end
