-- include: bands
-- The clock, counters and settings of the pool, its decision log, and notifications to replicas.
-- Uses reads and writes from lib/storage.lua, `bands`. Defines `now_us`, `now_ms`, `settings`, `pool`, `notifications`.

-- [clock] Tests replace the code from this mark to [/clock] (picker_fleet/state/scripts.py).
-- The fleet has only one clock: Redis's TIME, corrected for steps. Clocks of replicas are never compared.
--
-- TIME may be set forward or back by hours. The pool's time is TIME plus an offset. The field `clock` stores the offset
-- and a recent value of the pool's time, at most a quarter of a second old. The pool's time never goes back, except by
-- at most a quarter of a second when another server takes over. If the pool's time would advance by more than STEP_US
-- since the last call, either TIME was set or no call came, so the pool's time stays. The next heartbeat adds the time
-- that really passed, as measured by the replica that sends it (`advance_clock`). So no timer is due early by more than
-- STEP_US.

local now_us, now_ms
local steady_clock, advance_clock, clock_change
local clock_shift_ms = 0 -- the pool's time minus Redis's TIME
do
  local STEP_US = 1000000
  local SAVED_EVERY_US = 250000
  local offset_us, last_us, saved_us
  local moved -- whether the call must store the clock's offset, which has changed or could not be read
  local function set(us)
    now_us, last_us = us, us
    now_ms, clock_shift_ms = math.floor(us / 1000), offset_us / 1000
  end

  -- Set the variables now_us and now_ms. The argument `text`, the stored offset and time, is parsed unless cached
  -- values are valid (`known`).
  function steady_clock(known, text)
    local time = redis.call('TIME')
    local time_us = tonumber(time[1]) * 1000000 + tonumber(time[2])
    if not known then
      local valid, offset, last = pcall(struct.unpack, 'dd', text)
      offset_us, last_us, moved = valid and offset or 0, valid and last or time_us, not valid
      saved_us = last_us
    end
    local passed_us = time_us + offset_us - last_us
    if passed_us < 0 or passed_us > STEP_US then
      offset_us, moved = offset_us - passed_us, true
    end
    set(time_us + offset_us)
  end

  -- Advance the pool's time to `us`, unless the pool's time is already later.
  function advance_clock(us)
    if us <= now_us then return end
    offset_us, moved = offset_us + us - now_us, true
    set(us)
  end

  -- Return the text to store in the field `clock`; nil if the stored text is recent. A caller that stores the text also
  -- changes the counter MOVED, so that other libraries reread the clock.
  function clock_change()
    if not (moved or now_us - saved_us >= SAVED_EVERY_US) then return nil end
    saved_us, moved = now_us, false
    return struct.pack('dd', offset_us, now_us)
  end
end
-- [/clock]

-- The pool's counters are read once a call, and written once if any has changed. One field holds all counters, packed
-- as doubles, at a tenth of the cost of a field for each counter; bands.lua packs the counters of dynamic bands in
-- another field. Settings are decoded only after a change. If the pool's format number differs or is missing, the call
-- fails at once.
local settings, settings_text -- the settings in force, decoded and as JSON; kept between calls
-- Whether this library's caches are valid: no other library has changed the counters or published endpoints since the
-- last call. Each call that changes settings, endpoints, loads or the clock changes a counter (`pool.touched`). The
-- caches are valid for at most REMEMBERED_MS, since a demoted primary misses changes.
local cache_is_valid
local REMEMBERED_MS = 1000
local live = {} -- replica -> whether its last heartbeat is recent, as far as this call knows
do -- a block of its own: Lua allows 200 local variables in a chunk
  local counters_text, saved = nil, {} -- the counters as last read or written: packed; in the order of COUNTERS
  local MOVED = 1
  while COUNTERS[MOVED] ~= 'moved' do MOVED = MOVED + 1 end
  -- The first BUSY counters change with each request. The other counters are packed (calm_text) only when one of them
  -- changes.
  local BUSY = 8
  local calm_text, added = nil, '' -- `added`: packed counters that only a later version of this library knows
  local BUSY_FORMAT, CALM_FORMAT -- set by the first call: `string` is missing while Redis loads the library
  local called_ms, endpoints_version, read_key = 0, nil, nil
  local NO_SETTINGS = {
    total_capacity = 0, flow_capacity = 0, lease_ms = 0, silence_ms = 0, fallbacks = 0, log_max = 0,
    window_ms = 60000, ema_alpha = 0.2, guard_share = 0, starvation_ms = 0, ordering = ORDERING_FCFS, weights = {},
  }

  -- Within a format, versions only add counters at the end. Counters that the writing version did not know are 0.
  local function padded(text)
    local missing = 8 * #COUNTERS - #text
    return missing > 0 and text .. string.rep('\0', missing) or text
  end

  function pool.read(failed)
    if not BUSY_FORMAT then BUSY_FORMAT, CALM_FORMAT = string.rep('d', BUSY), string.rep('d', #COUNTERS - BUSY) end
    local text, settings_now, endpoints_now, clock_text, same, bands_text, bytes_text, format
    if key == read_key and counters_text and settings_text and not failed then
      text = redis.call('HGET', key.pool, 'counters')
      same = text == counters_text
    end
    if same then
      settings_now, endpoints_now = settings_text, endpoints_version
    else
      text, settings_now, endpoints_now, clock_text, bands_text, bytes_text, format = unpack(redis.call('HMGET',
        key.pool, 'counters', 'settings', 'endpoints_version', 'clock', 'bands', 'waiting_bytes', 'format'))
      if format ~= FORMAT and (format or redis.call('HLEN', key.pool) > 0) then
        error({err = 'FORMAT ' .. (format or 'none')}, 0)
      end
      pool.is_new = not format
      same = not failed and text and text == counters_text
    end

    read_key = key
    steady_clock(same, clock_text)
    if not same then
      local numbers = text and {struct.unpack(BUSY_FORMAT .. CALM_FORMAT, padded(text))} or {}
      for i = 1, #COUNTERS do pool[COUNTERS[i]] = numbers[i] or 0 end
      counters_text, saved, added = text, numbers, text and string.sub(text, numbers[#COUNTERS + 1]) or ''
      calm_text = text and struct.pack(CALM_FORMAT, unpack(numbers, BUSY + 1, #COUNTERS)) .. added
      bands.read(bands_text)
      bands.read_bytes(bytes_text, now_us)
    end
    pool.known = pool.epoch ~= 0
    cache_is_valid = same and settings_now == settings_text and endpoints_now == endpoints_version
      and now_ms - called_ms < REMEMBERED_MS
    called_ms, endpoints_version = now_ms, endpoints_now
    if text ~= key.counters then
      key.counters = text
      pool.note_possible_loss()
    end
    pool.ended_before, pool.touched = pool.ended, false
    if next(live) then live = {} end
    if not settings_now then
      settings, settings_text = NO_SETTINGS, nil
      bands.configure(settings)
    elseif settings_now ~= settings_text then
      settings, settings_text = cjson.decode(settings_now), settings_now
      bands.configure(settings)
    end
  end

  -- Store the format number before the first write to the pool's hash. Functions that may create the hash call this
  -- function.
  function pool.create()
    if not pool.is_new then return end
    pool.is_new = false
    defer_write('HSET', key.pool, 'format', FORMAT)
    flush(key.pool)
  end

  -- Defer writing the fields of the pool's hash that this call has changed.
  function pool.commit()
    if not pool.known then return end
    local bands_text, clock_text = bands.change(), clock_change()
    local touched, changed = pool.touched or bands_text or clock_text, 0
    pool.touched = false -- a repeated commit must not count `moved` again
    for i = 1, #COUNTERS do
      local number = pool[COUNTERS[i]]
      if number ~= saved[i] then saved[i], changed = number, i end
    end
    if changed == 0 then
      if not touched then return end
      pool.moved, changed = pool.moved + 1, MOVED -- makes the libraries of other versions drop their caches
      saved[MOVED] = pool.moved
    end
    if changed > BUSY then calm_text = struct.pack(CALM_FORMAT, unpack(saved, BUSY + 1, #COUNTERS)) .. added end
    counters_text = struct.pack(BUSY_FORMAT, unpack(saved, 1, BUSY)) .. calm_text
    key.counters = counters_text
    defer_write('HSET', key.pool, 'counters', counters_text)
    if bands_text then defer_write('HSET', key.pool, 'bands', bands_text) end
    if clock_text then defer_write('HSET', key.pool, 'clock', clock_text) end
    if bands.keeps_bytes then
      local bytes_text = bands.bytes_text()
      defer_write('HSET', key.pool, 'waiting_bytes', bytes_text)
      bands.keeps_bytes = bytes_text ~= ''
    end
  end
end

-- Records of running requests may be missing if this Redis server did not make the last change itself (its data was
-- lost, the server restarted, or it was not the primary), or if a silent replica has returned. Replicas report every
-- running request again, at the latest with its next renewal, which restores the missing records.
local LONGER_MS = 10000 -- how long after its lease has ended a request may still be reported from an outage journal
function pool.note_possible_loss() key.lacks_ms = now_ms end
function pool.may_lack_records() return now_ms - key.lacks_ms < settings.lease_ms + LONGER_MS end

-- Record that the key `name` was lost; the next sweep ends the epoch.
function pool.note_lost(name)
  if pool.known then defer_write('HSET', key.pool, 'lost', name) end
end

function pool.is_live(owner)
  if live[owner] == nil then
    live[owner] = tonumber(read('ZSCORE', key.replicas, owner) or 0) > now_ms - settings.silence_ms
  end
  return live[owner]
end

-- Subtract `taken` from the stock. Sums of fractions leave a residue, which must not count as a running request.
local RESIDUE = 1e-6
function pool.release(taken)
  local left = pool.stock - taken
  pool.stock = left > RESIDUE and left or 0
end

-- The stock that a request takes under the bound `most`: its cost, but at most the fraction `largest_claim` of the
-- bound, since clients may ask for any number of sequences or tokens. Any request may take 1, or the whole bound if the
-- bound is below 1. If the queue is off, requests are placed as they arrive and take no stock.
function pool.stock_for(cost, most)
  if settings.queue_enabled == 0 then return 0 end
  local claim = most * (settings.largest_claim or 1)
  if claim < 1 then claim = most < 1 and most or 1 end
  return cost < claim and cost or claim
end

-- An exponential moving average. An average below SMALLEST becomes 0: quotients of ever smaller averages would
-- overflow.
local SMALLEST, MOST_RETRY_S = 1e-9, 60
function pool.smoothed(mean, figure, alpha)
  local found = alpha * figure + (1 - alpha) * mean
  return found < SMALLEST and 0 or found
end

-- Return the Retry-After for a refused client: the estimated time until the queue has drained, 1 to MOST_RETRY_S
-- seconds.
function pool.retry_after_s()
  if pool.rate == 0 then return 1 end
  return math.max(1, math.min(MOST_RETRY_S, math.ceil((pool.queued + 1) / pool.rate)))
end

-- Return the arrival number of a request that arrives now: the time in us, or the last number plus 1 if that is
-- greater.
function pool.next_arrival_us()
  local seq = pool.seq + 1
  if seq < now_us then seq = now_us end
  pool.seq = seq
  return seq
end

-- Return the milliseconds by which the ordering `edf` serves request r before its deadline: the time that the request
-- will take, by the replica's prediction. The attempt has the form `NUMBER-EARLY_MS.DIGEST`, or `NUMBER.DIGEST` for 0.
function pool.early_ms(r)
  return settings.ordering == ORDERING_EDF and tonumber(string.match(r.attempt or '', '^%d+%-(%d+)')) or 0
end

-- The decision log is a stream with one entry per event, in the order of decisions; it is off when log_max is 0.
-- Entries are written when the call commits, so a call that fails earlier leaves none. The field `tag` is the start tag
-- of the flow queue; `by` is `turn` or `guard`; docs/redis-schema.md lists the values of `note`.
local entries, logged = {}, 0
local function exact(number) return string.format('%.17g', number) end
local function log_event(event, r, tag, by, note)
  if settings.log_max == 0 then return end
  pool.log_seq = pool.log_seq + 1
  logged = logged + 1
  entries[logged] = {'MAXLEN', '~', settings.log_max, '*',
    'seq', exact(pool.log_seq), 'time_us', exact(now_us), 'event', event, 'request', r.id, 'flow', r.flow,
    'band', r.band, 'priority', exact(PRIORITY[r.band]), 'workload', r.workload,
    'cost', exact(r.cost), 'weight', exact(r.weight),
    'arrived', exact(r.arrived), 'deadline_ms', exact(r.deadline_ms), 'due_ms', r.due_ms and exact(r.due_ms) or '',
    'limit', exact(r.limit), 'bytes', exact(r.bytes), 'early_ms', exact(pool.early_ms(r)),
    'tag', tag and exact(tag) or '', 'v', exact(pool[V[r.band]]), 'by', by or '',
    'owner', r.owner, 'endpoint', r.state == STATE_GRANTED and '' or string.match(r.endpoints, '^[^,]*'),
    'stock', exact(pool.stock), 'queued', exact(pool.queued), 'upper', exact(pool.upper), 'lower', exact(pool.lower),
    'note', type(note) == 'number' and exact(note) or note or ''}
  if r.state == STATE_PLACED and r.prefillers ~= '' then
    local entry = entries[logged]
    entry[#entry + 1], entry[#entry + 2] = 'prefill', string.match(r.prefillers, '^[^,]*')
  end
end

local function commit_log()
  for i = 1, logged do
    if entries[i] then redis.call('XADD', key.log, unpack(entries[i])) end
    entries[i] = false
  end
end

local function reset_log()
  if logged > 0 then entries, logged = {}, 0 end
end

-- The request fields in the log entry of an event that concerns a flow queue or the whole pool, not a single request.
local NO_REQUEST = {
  id = '', flow = '', band = 0, workload = '', cost = 0, weight = 1, arrived = 0, deadline_ms = 0, limit = 0,
  bytes = 0, owner = '', endpoints = '',
}

local function log_change(event, note) log_event(event, NO_REQUEST, nil, nil, note) end
local function log_flow_queue(event, band, flow_queue, tag)
  if settings.log_max == 0 then return end
  local subject = {}
  for name, value in pairs(NO_REQUEST) do subject[name] = value end
  subject.band, subject.flow = band, flow_queue
  log_event(event, subject, tag)
end

-- Notifications for the replicas that own requests. A notification stays in the replica's inbox until the replica takes
-- it; a wake-up, which may be lost, announces it. The reply to the calling replica contains that replica's
-- notifications.
local notifications = {}
local function notify(owner, line)
  if owner == notifications.caller then
    local own = notifications.for_caller
    own[#own + 1] = line
  else
    local text = notifications.for_others[owner]
    notifications.for_others[owner] = text and text .. '\n' .. line or line
  end
end

function notifications.add(owner, id, what)
  -- Dispatch grants only to live replicas. Other notifications need a check: a removed replica never empties its inbox.
  if what == NOTIFY_GRANTED or read('ZSCORE', key.replicas, owner) then
    defer_write('HSET', key.inbox[owner], id, what)
  end
  notify(owner, what .. ' ' .. id)
end

-- Notify the owner that the grant has also placed r; `reply` is in the format of the script `place`. The notification
-- names the attempt, since the id may be reused before the replica reads the notification.
function notifications.placed_for(attempt) return NOTIFY_PLACED .. ' ' .. attempt end
function notifications.add_placed(r, reply)
  local note = notifications.placed_for(r.attempt)
  defer_write('HSET', key.inbox[r.owner], r.id, note)
  notify(r.owner, note .. string.sub(reply, 7) .. ' ' .. r.id)
end

-- Return whether request r is granted, or placed by its grant and not yet acknowledged. `note`: the notification about
-- r, if read.
function notifications.is_untaken(r, note)
  note = note or read('HGET', key.inbox[r.owner], r.id)
  return r.state == STATE_GRANTED or r.state == STATE_PLACED and note == notifications.placed_for(r.attempt)
end

function notifications.withdraw(owner, id) defer_write('HDEL', key.inbox[owner], id) end

function notifications.publish()
  for owner, text in pairs(notifications.for_others) do redis.call('PUBLISH', key.wake(owner), text) end
end

notifications.for_caller, notifications.for_others = {}, {}
local function reset_notifications(caller)
  notifications.caller = caller
  if notifications.for_caller[1] then notifications.for_caller = {} end
  if next(notifications.for_others) then notifications.for_others = {} end
end
