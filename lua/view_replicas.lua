-- include: view
-- Replicas that are known, live or not, and what they give of themselves. Reads only.
--
-- keys[1] epp:{POOL}:pool
-- args[1] how many of them
-- Returns {now_us, replica, last heartbeat (ms), about (JSON)...}, those heard of last first
local function view_replicas(args)
  local found = redis.call('ZREVRANGE', key.replicas, 0, tonumber(args[1]) - 1, 'WITHSCORES')
  local reply = {full(now_us)}
  for i = 1, #found, 2 do
    reply[#reply + 1] = found[i]
    reply[#reply + 1] = found[i + 1]
    reply[#reply + 1] = redis.call('HGET', key.about, found[i]) or '{}'
  end
  return reply
end
