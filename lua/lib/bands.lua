-- include: storage schema
-- The priority bands of the queue. A priority is any int32. By default the band of the highest priority that has
-- waiting requests is served first; under the band policy `weighted`, each band gets service in proportion to its
-- weight. Records and keys hold the number of a band, which fits in a byte. The named bands critical, default and
-- sheddable have the numbers 0 to 2, whatever their priorities. Bands with numbers from 3 on are dynamic. The function
-- `bands.of` creates a band when a request of a new priority arrives; the sweep removes the band when none of its
-- requests waits or runs. A dynamic band has the attributes of the nearest configured band at or below its priority, or
-- else of the lowest configured band. If all numbers are in use, a request of a new priority joins the nearest band.
--
-- The field `waiting_bytes`, written with the counters, has the total size of each band's waiting request bodies. If
-- the field is lost, the sizes restart at 0 in a new epoch. When a request leaves the queue, its body's size is
-- subtracted only if it was added in the current epoch. This file uses keys from lib/storage.lua, names from the
-- schema. This file defines `bands`, the tables by band number below, and the table `pool`, which lib/pool.lua fills.

local pool = {} -- the counters of the pool, which lib/pool.lua reads and writes
-- Tables by band number: names of the band's counters (formatting a name costs as much as a Redis command), then the
-- band's attributes. A band number without an entry in PRIORITY is not in use.
local QUEUED, V, NEW, BAND_TAG = {}, {}, {}, {}
local PRIORITY, RANK, BAND_WEIGHT, PREEMPTIBLE, GUARANTEED, CAPACITY = {}, {}, {}, {}, {}, {}
local BANDS = {0, 1, 2} -- the band numbers in use, the highest priority first
local LAST_NAMED = 2
local LEAST_PRIORITY, MOST_PRIORITY = -2147483648, 2147483647
-- keeps_bytes: whether the field `waiting_bytes` must be written; limit_bytes: whether any band limits bytes
local bands = {keeps_bytes = false, limit_bytes = false}
do -- a block of its own: Lua allows 200 local variables in a chunk
  local LAST = 63
  -- fields of a dynamic band: number, priority, requests (waiting or running), queued, v, new, tag
  local STORED, FIELDS = '%d %d %d %d %.17g %.17g %.17g', 7
  local DEFAULTS = { -- the bands if the settings have none
    {priority = 10, guaranteed = true}, {priority = 0, preemptible = true}, {priority = -10, preemptible = true},
  }
  local REQUESTS = {} -- band number -> name of its counter of requests, like QUEUED
  for band = 0, LAST do
    QUEUED[band], V[band], NEW[band] = 'queued:' .. band, 'v:' .. band, 'new:' .. band
    BAND_TAG[band], REQUESTS[band] = 'band:' .. band, 'requests:' .. band
  end

  local bytes, byte_limits = {}, {} -- band number -> bytes of its waiting bodies, and their limit
  local bytes_epoch = 0
  local bytes_text -- the text of `bytes` for Redis; nil: the commit formats it again
  local configured, weights = DEFAULTS, {} -- configured bands, and their weights; the three named bands come first
  local band_of = {} -- priority -> number
  local others, stored = {}, '' -- the numbers of the dynamic bands; the field `bands` as stored in Redis
  -- Return the index of the highest of `count` priorities that is at most `priority`; if none is, of the lowest
  -- priority.
  local function nearest(priority, count, priority_of)
    local found, lowest
    for i = 1, count do
      local each = priority_of(i)
      if each <= priority and not (found and priority_of(found) >= each) then found = i end
      if not (lowest and priority_of(lowest) <= each) then lowest = i end
    end
    return found or lowest
  end

  local function configured_priority(i) return configured[i].priority end
  function bands.clamp(number, least, most)
    if number >= least and number <= most then return number end
    return number > most and most or least -- NaN: the least
  end

  function bands.clamp_cost(cost) return bands.clamp(cost, 0, MOST_COST) end

  local function take_attributes(band, i)
    local attributes = configured[i]
    BAND_WEIGHT[band] = bands.clamp(weights[i] or 1, LEAST_WEIGHT, MOST_WEIGHT)
    CAPACITY[band] = attributes.capacity or math.huge
    PREEMPTIBLE[band], GUARANTEED[band] = attributes.preemptible or false, attributes.guaranteed or false
    byte_limits[band] = attributes.bytes or math.huge
  end

  local function comes_before(a, b)
    return PRIORITY[a] > PRIORITY[b] or (PRIORITY[a] == PRIORITY[b] and a < b)
  end

  -- Sort the bands in use by priority, and update the attributes of each band.
  local function arrange()
    band_of = {}
    for i = #BANDS, 1, -1 do BANDS[i] = nil end
    for _, band in ipairs(others) do
      take_attributes(band, nearest(PRIORITY[band], #configured, configured_priority))
      band_of[PRIORITY[band]] = band
      BANDS[#BANDS + 1] = band
    end
    for band = 0, LAST_NAMED do
      PRIORITY[band] = configured[band + 1].priority
      take_attributes(band, band + 1)
      band_of[PRIORITY[band]] = band
      BANDS[#BANDS + 1] = band
    end
    table.sort(BANDS, comes_before)
    for rank, band in ipairs(BANDS) do RANK[band] = rank end
  end

  -- Put the bands of new settings in force.
  function bands.configure(settings)
    configured, weights = settings.bands or DEFAULTS, settings.band_weights or {}
    bands.limit_bytes = false
    for _, each in ipairs(configured) do bands.limit_bytes = bands.limit_bytes or each.bytes ~= nil end
    arrange()
  end

  -- Read the dynamic bands and their counters from the field `bands` (nil: none).
  function bands.read(text)
    text = text or ''
    if text == '' and not others[1] then return end
    for _, band in ipairs(others) do PRIORITY[band] = nil end
    others, stored = {}, text
    local numbers = {}
    for number in string.gmatch(text, '%S+') do numbers[#numbers + 1] = tonumber(number) or 0 end
    for at = 1, #numbers, FIELDS do
      local band, priority, requests, queued, v, new, tag = unpack(numbers, at, at + FIELDS - 1)
      others[#others + 1] = band
      PRIORITY[band], pool[REQUESTS[band]], pool[QUEUED[band]] = priority, requests, queued
      pool[V[band]], pool[NEW[band]], pool[BAND_TAG[band]] = v, new, tag
    end
    arrange()
  end

  -- Read the epoch and the bytes of each band from the field `waiting_bytes` (nil or '': none). `now` is in us.
  function bands.read_bytes(text, now)
    bands.keeps_bytes = (text or '') ~= ''
    for band in pairs(bytes) do bytes[band] = nil end
    bytes_text = nil
    bytes_epoch = now % 2 ^ 32
    if not bands.keeps_bytes then return end
    local numbers = {}
    for number in string.gmatch(text, '%S+') do numbers[#numbers + 1] = tonumber(number) end
    bytes_epoch = numbers[1]
    for at = 2, #numbers, 2 do bytes[numbers[at]] = numbers[at + 1] end
  end

  -- Return the text of the field `waiting_bytes`; '' if no bytes wait.
  function bands.bytes_text()
    if not bytes_text then
      local numbers = {bytes_epoch}
      for band, waiting in pairs(bytes) do
        if waiting > 0 then numbers[#numbers + 1], numbers[#numbers + 2] = band, waiting end
      end
      bytes_text = numbers[2] and table.concat(numbers, ' ') or ''
    end
    return bytes_text
  end

  -- Add the body of r to the waiting bytes of its band (`change` 1), or subtract it (-1).
  function bands.count_bytes(r, change)
    if change > 0 then r.bytes_epoch = bytes_epoch elseif r.bytes_epoch ~= bytes_epoch then return end
    local band = r.band
    bytes[band] = math.max((bytes[band] or 0) + change * r.bytes, 0)
    bands.keeps_bytes, bytes_text, pool.touched = true, nil, true
  end

  -- Reset the counts of requests and bytes of all bands. `now` is in us.
  function bands.begin_count(now)
    for _, band in ipairs(BANDS) do pool[QUEUED[band]] = 0 end
    for _, band in ipairs(others) do pool[REQUESTS[band]] = 0 end
    bands.read_bytes('', now)
    bands.keeps_bytes = true -- the commit then empties `waiting_bytes`
  end

  function bands.bytes(band) return bytes[band] or 0 end
  function bands.has_room_for_bytes(r) return (bytes[r.band] or 0) + r.bytes <= byte_limits[r.band] end
  -- Reset the byte count of a band in which no request waits.
  function bands.forget_bytes(band)
    if bytes[band] then bytes[band], bytes_text, bands.keeps_bytes, pool.touched = nil, nil, true, true end
  end

  -- Return the new text of the field `bands` if this call has changed a dynamic band, else nil.
  function bands.change()
    if stored == '' and not others[1] then return nil end
    local lines = {}
    for i, band in ipairs(others) do
      lines[i] = string.format(STORED, band, PRIORITY[band], pool[REQUESTS[band]], pool[QUEUED[band]], pool[V[band]],
        pool[NEW[band]], pool[BAND_TAG[band]])
    end
    local text = table.concat(lines, '\n')
    if text == stored then return nil end
    stored = text
    return text
  end

  local function priority_in_use(i) return PRIORITY[BANDS[i]] end
  local function make(priority)
    local band = LAST_NAMED + 1
    while PRIORITY[band] do band = band + 1 end
    if band > LAST then return BANDS[nearest(priority, #BANDS, priority_in_use)] end
    others[#others + 1] = band
    PRIORITY[band], pool[REQUESTS[band]], pool[QUEUED[band]] = priority, 0, 0
    pool[V[band]], pool[NEW[band]], pool[BAND_TAG[band]] = 0, 0, 0
    arrange()
    return band
  end

  -- Return the number of the band with this priority; create a dynamic band if there is none.
  function bands.of(priority) return band_of[priority] or make(priority) end

  -- Return the number of the band with this priority, or nil.
  function bands.find(priority) return band_of[priority] end

  -- Count a request that enters (`change` 1) or leaves (-1) a dynamic band.
  function bands.count_request(band, change)
    local name = REQUESTS[band]
    pool[name] = math.max(pool[name] + change, 0)
  end

  -- Return the dynamic bands that have no requests and whose tag is at most bv, the virtual time across bands. In an
  -- idle pool ignore the tags.
  function bands.idle()
    local idle = {}
    local at_rest = pool.queued == 0 and pool.stock == 0
    for _, band in ipairs(others) do
      local is_even = at_rest or pool[BAND_TAG[band]] <= pool.bv
      if is_even and pool[REQUESTS[band]] == 0 and pool[QUEUED[band]] == 0 then idle[#idle + 1] = band end
    end
    return idle
  end

  -- Remove an idle dynamic band. The band's keys are unlinked when the call ends, so the call must not make another
  -- band after this removal.
  function bands.collect(band)
    for _, kind in ipairs({'flows', 'throttled', 'finish', 'candidates', 'preempted'}) do
      defer_unlink(key[kind][band])
    end
    for i = #others, 1, -1 do
      if others[i] == band then table.remove(others, i) end
    end
    PRIORITY[band], RANK[band], bytes[band], bytes_text = nil, nil, nil, nil
    arrange()
  end
end
