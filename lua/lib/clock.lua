-- The only clock: Redis's own, less its steps. Replica clocks are never compared.
--
-- TIME may be set forward or back by hours. What the pool calls now is TIME and an offset, kept in its field `clock`
-- with a moment that is a quarter of a second old at most. It never goes back, but by so much where another server
-- takes over. Where it would have gone on by more than STEP_US since it was last asked, either TIME was set or nobody
-- called for so long: it then stays where it was. What really passed meanwhile comes back with the next heartbeat,
-- whose replica has measured it (`advance_clock`). Nothing is due early by more than STEP_US.
local now_us, now_ms
local steady_clock, advance_clock, clock_change
local clock_shift_ms = 0 -- what now is ahead of TIME
do
  local STEP_US = 1000000
  local SAVED_EVERY_US = 250000
  local offset_us, last_us, saved_us
  local moved -- it must be saved
  local function set(us)
    now_us, last_us = us, us
    now_ms, clock_shift_ms = math.floor(us / 1000), offset_us / 1000
  end
  -- Now, by what the pool holds of it: `text`, unless it is what is known.
  function steady_clock(known, text)
    local time = redis.call('TIME')
    local time_us = tonumber(time[1]) * 1000000 + tonumber(time[2])
    if not known then
      local read, offset, last = pcall(struct.unpack, 'dd', text)
      offset_us, last_us, moved = read and offset or 0, read and last or time_us, not read
      saved_us = last_us
    end
    local passed_us = time_us + offset_us - last_us
    if passed_us < 0 or passed_us > STEP_US then
      offset_us, moved = offset_us - passed_us, true
    end
    set(time_us + offset_us)
  end
  -- It is at least `us` by now.
  function advance_clock(us)
    if us <= now_us then return end
    offset_us, moved = offset_us + us - now_us, true
    set(us)
  end
  -- What is to be saved of it, if anything. Whoever saves it changes a counter, by which others know.
  function clock_change()
    if not (moved or now_us - saved_us >= SAVED_EVERY_US) then return nil end
    saved_us, moved = now_us, false
    return struct.pack('dd', offset_us, now_us)
  end
end
