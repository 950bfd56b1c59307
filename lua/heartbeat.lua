-- include: dispatch
-- A replica says that it lives, and learns what it must know: whether the shared state is the one it
-- knew, who publishes, the bounds, and the news that a lost wake-up may have left in its inbox.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica
-- args[2] JSON it gives of itself
-- args[3] silence_ms: a replica that has been silent for so long is gone, as it is for dispatch and sweep
-- args[4] signing keys that it offers (picker_fleet/signing.py), parted by blanks: a fresh one, then those it
--   holds; none of a caller that signs nothing
-- args[5] and args[6] `born` and now_us as its last heartbeat told them, now_us with what has passed since then added
--   (us, by its monotonic clock); none: not known
-- Returns {born, news, attempts, served, was_known (0: it was away or is new), leader (1: it publishes),
--   live replicas, config version, endpoints version ('VERSION+MARKS' once there were marks), tuned version,
--   stock, queued, upper, lower, ready, paused (0 or 1), the fleet's signing keys, older (1: a version that does
--   not sign has been at work within the hour), now_us}; numbers as strings where they may have fractions
-- Bounded, since a replica may have any number of requests that end at once.
local NEWS_LIMIT = 256 -- of more, some now and the others at the next heartbeats
local function news_in(inbox)
  if redis.call('HLEN', inbox) <= NEWS_LIMIT then return redis.call('HGETALL', inbox) end
  return redis.call('HRANDFIELD', inbox, NEWS_LIMIT, 'WITHVALUES')
end
-- The fleet's signing keys, newest first, with a new one each day. Replicas hold them too: what they offer and a
-- pool that was lost lacks goes back in. A signature is good for a week less a day at least.
local KEY_LIFE_MS = 86400000
local KEYS_KEPT = 8
local function keep_keys(kept, offered)
  local keys, held, since_ms, fresh = {}, {}, nil, nil
  for word in string.gmatch(kept or '', '%S+') do
    if since_ms then keys[#keys + 1], held[word] = word, true else since_ms = tonumber(word) end
  end
  for word in string.gmatch(offered, '%S+') do
    if not fresh then
      fresh = word
    elseif not held[word] and #keys < KEYS_KEPT then
      keys[#keys + 1], held[word] = word, true
    end
  end
  since_ms = since_ms or now_ms
  if fresh and (#keys == 0 or now_ms - since_ms >= KEY_LIFE_MS) then
    table.insert(keys, 1, fresh)
    keys[KEYS_KEPT + 1], since_ms = nil, now_ms
  end
  local text = table.concat(keys, ' ')
  local anew = full(since_ms) .. ' ' .. text
  if text ~= '' and anew ~= kept then later('HSET', key.pool, 'signing_keys', anew) end
  return text
end
local function heartbeat(args)
  local owner, about, silence_ms = args[1], args[2], tonumber(args[3])
  if args[5] and args[5] == full(pool.born) then advance_clock(tonumber(args[6])) end
  forget_news(owner)
  local last = redis.call('ZSCORE', key.replicas, owner)
  remember(key.replicas, owner, last)
  last = tonumber(last or 0)
  local was_known = last > now_ms - silence_ms and 1 or 0
  -- A version that can't sign tickets, and may change loads without telling ours, beats on whole milliseconds.
  write_now('ZADD', key.replicas, now_ms - 0.5, owner)
  later('HSET', key.about, owner, about)
  -- A sweep may have begun on what it queued before; the next silence is walked from the start.
  if was_known == 0 then
    later('HDEL', key.orphans, owner)
    if args[5] then pool.may_lack() end -- it has been away; one that is new brings nothing
  end
  local others = redis.call('ZRANGEBYSCORE', key.replicas, '(' .. (now_ms - silence_ms), '+inf', 'WITHSCORES')
  local leader = 1
  for i = 1, #others, 2 do
    if others[i] < owner then leader = 0 end
    if tonumber(others[i + 1]) % 1 == 0 then pool.older_ms = now_ms end
  end
  local versions = redis.call('HMGET', key.pool, 'config_version', 'endpoints_version', 'tuned_version',
    'marks_version', 'signing_keys')
  local inbox, left, granted = news_in(key.inbox[owner]), {}, {}
  for i = 1, #inbox, 2 do
    if inbox[i + 1] == 'granted' then
      granted[#granted + 1] = inbox[i]
    else
      left[#left + 1] = inbox[i + 1] .. ' ' .. inbox[i]
      later('HDEL', key.inbox[owner], inbox[i]) -- it has no other trace, and is told once
    end
  end
  record.prefetch(granted, #granted)
  for _, id in ipairs(granted) do
    local r = record.read(id)
    if r and r.state == 'granted' and r.owner == owner then
      left[#left + 1] = 'granted ' .. id -- it stays until place takes it
    else
      strays = strays + 1
      news.forget(owner, id)
    end
  end
  local signing_keys = keep_keys(versions[5], args[4] or '')
  local head = conclude()
  for _, item in ipairs(head[2]) do left[#left + 1] = item end
  return {
    head[1], left, head[3], head[4], was_known, leader, #others / 2, versions[1] or '',
    (versions[2] or '') .. (versions[4] and '+' .. versions[4] or ''),
    versions[3] or '', full(pool.stock), pool.queued, full(pool.upper), full(pool.lower), pool.ready,
    settings.paused or 0, signing_keys, pool.is_mixed() and 1 or 0, full(now_us),
  }
end
