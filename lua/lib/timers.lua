-- include: pool
-- When the next thing of each waiting request is due. The earliest is remembered, or a moment before it: until then
-- there is nothing to ask for.
local timers = {}
do
  local next_ms -- nil: not known
  local set_ms -- the earliest that this call has set
  function timers.forget()
    if not remembered then next_ms = nil end
    set_ms = math.huge
  end
  function timers.set(id, due_ms)
    if next_ms and due_ms < next_ms then next_ms = due_ms end
    if due_ms < set_ms then set_ms = due_ms end
    later('ZADD', key.timers, due_ms, id)
  end
  function timers.stop(id) later('ZREM', key.timers, id) end
  local function first_ms() return tonumber(redis.call('ZRANGE', key.timers, 0, 0, 'WITHSCORES')[2] or math.huge) end
  -- Whether there is one whose time has come; all are then in Redis.
  function timers.due()
    if next_ms and now_ms < next_ms then return false end
    next_ms = math.min(first_ms(), set_ms)
    if next_ms > now_ms then return false end
    send(key.timers)
    next_ms = first_ms()
    return next_ms <= now_ms
  end
end
