-- include: pool
-- The workload registry (specs/001): total, active, dispatched, ema_ms (average wait), last_ms, slot,
-- and seven counts of arrivals, newest first, each over a sixth of the rate window. The rate slides: it
-- is the newest count, the five before, and the part of the seventh that the window still covers.
-- An anonymous request has workload '' and leaves nothing here; nor does one of a workload that would be one
-- too many, so that a client with a new id for each request cannot make the registry grow.
local workloads = {}
local parse_workload, forget_workloads
do
  local WORKLOAD = 'ddddddddddddd'
  local known_workloads, changed_workloads = {}, {}
  -- What is known stays for the next call while nobody else has changed the pool, so that it need not be read again.
  -- (Records would gain less, and take more than Redis needs for them.)
  local MOST_KNOWN = 256
  local known_count = 0
  local registered -- how many there are, once this call has had to ask
  local function unpack_workload(text) return {struct.unpack(WORKLOAD, text)} end
  function parse_workload(id, text)
    local known, w = false, nil
    if text then
      known, w = pcall(unpack_workload, text)
      if not known then strays = strays + 1 end -- it begins anew
    end
    if not known then w = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0} end
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
  -- A dispatch that came to nothing: its request waits again, and counts when it is dispatched for good. The average
  -- keeps the wait it had by then.
  function workloads.sent_back(id)
    if id == '' then return end
    local w = workload(id)
    w[3] = w[3] > 1 and w[3] - 1 or 0
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
    later('HDEL', key.workloads, id)
  end
  function workloads.idle(text, idle_ms)
    local known, _, active, _, _, last_ms = pcall(struct.unpack, WORKLOAD, text)
    if not known then strays = strays + 1 end
    return not known or (active == 0 and now_ms - last_ms > idle_ms)
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
  function forget_workloads()
    if not remembered or known_count > MOST_KNOWN then known_workloads, known_count = {}, 0 end
    if next(changed_workloads) then changed_workloads = {} end
    registered, slot = nil, nil
  end
end
