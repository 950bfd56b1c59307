-- include: pool
-- When the next thing of each waiting request is due. The earliest is remembered, or a moment before it: until then
-- there is nothing to ask for.
local timers = {}
do
  local next_ms -- nil: not known
  function timers.forget()
    if not remembered then next_ms = nil end
  end
  function timers.set(id, due_ms)
    if next_ms and due_ms < next_ms then next_ms = due_ms end
    later('ZADD', key.timers, due_ms, id)
  end
  function timers.stop(id) later('ZREM', key.timers, id) end
  -- Whether there is one whose time has come; all are then in Redis.
  function timers.due()
    if next_ms and now_ms < next_ms then return false end
    send(key.timers)
    next_ms = tonumber(redis.call('ZRANGE', key.timers, 0, 0, 'WITHSCORES')[2] or math.huge)
    return next_ms <= now_ms
  end
end
