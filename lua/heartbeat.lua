-- include: dispatch
-- A replica says that it lives, and learns what it must know: whether the shared state is the one it
-- knew, who publishes, the bounds, and the news that a lost wake-up may have left in its inbox.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica
-- args[2] JSON it gives of itself
-- args[3] silence_ms: a replica that has been silent for so long is gone, as it is for dispatch and sweep
-- Returns {born, news, attempts, served, was_known (0: it was away or is new), leader (1: it publishes),
--   live replicas, config version, endpoints version ('VERSION+MARKS' once there were marks), tuned version,
--   stock, queued, upper, lower, ready, paused (0 or 1)}; numbers as strings where they may have fractions
-- Bounded, since a replica may have any number of requests that end at once.
local NEWS_LIMIT = 256 -- of more, some now and the others at the next heartbeats
local function news_in(inbox)
  if redis.call('HLEN', inbox) <= NEWS_LIMIT then return redis.call('HGETALL', inbox) end
  return redis.call('HRANDFIELD', inbox, NEWS_LIMIT, 'WITHVALUES')
end
local function heartbeat(args)
  local owner, about, silence_ms = args[1], args[2], tonumber(args[3])
  forget_news(owner)
  local last = tonumber(redis.call('ZSCORE', key.replicas, owner) or 0)
  local was_known = last > now_ms - silence_ms and 1 or 0
  redis.call('ZADD', key.replicas, now_ms, owner)
  redis.call('HSET', key.about, owner, about)
  -- A sweep may have begun on what it queued before; the next silence is walked from the start.
  if was_known == 0 then redis.call('HDEL', key.orphans, owner) end
  local others = redis.call('ZRANGEBYSCORE', key.replicas, '(' .. (now_ms - silence_ms), '+inf')
  local leader = 1
  for _, other in ipairs(others) do
    if other < owner then leader = 0 end
  end
  local versions = redis.call('HMGET', key.pool, 'config_version', 'endpoints_version', 'tuned_version',
    'marks_version')
  local inbox, left = news_in(key.inbox[owner]), {}
  for i = 1, #inbox, 2 do
    left[#left + 1] = inbox[i + 1] .. ' ' .. inbox[i]
    -- A grant stays until place takes it; an ending has no other trace and is told once.
    if inbox[i + 1] ~= 'granted' then later('HDEL', key.inbox[owner], inbox[i]) end
  end
  local head = conclude()
  for _, item in ipairs(head[2]) do left[#left + 1] = item end
  return {
    head[1], left, head[3], head[4], was_known, leader, #others, versions[1] or '',
    (versions[2] or '') .. (versions[4] and '+' .. versions[4] or ''),
    versions[3] or '', full(pool.stock), pool.queued, full(pool.upper), full(pool.lower), pool.ready,
    settings.paused or 0,
  }
end
