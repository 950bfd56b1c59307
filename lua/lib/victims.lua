-- include: pool ahead
-- Who gives way where the queue is full: `victims` has every backlogged lane below Critical by when it was last
-- preempted, kept as lanes come and go, so that no call ever has to put it together. Lanes that have drained
-- since are remembered in `preempted`, while there is pressure.
local victims = {}
function victims.expose(band, lane)
  local last = pool.pressed == 1 and redis.call('ZSCORE', key.preempted[band], lane)
  if last then redis.call('ZREM', key.preempted[band], lane) end
  later('ZADD', key.victims[band], last or 0, lane)
end
function victims.shield(band, lane)
  if pool.pressed == 1 then
    send(key.victims[band])
    local last = redis.call('ZSCORE', key.victims[band], lane)
    if tonumber(last or 0) > 0 then redis.call('ZADD', key.preempted[band], last, lane) end
  end
  later('ZREM', key.victims[band], lane)
end
-- The lane to be preempted next, and its newest request (under edf, that with the latest deadline); nil if there is
-- none.
local VICTIMS_LOOKED_AT = 16
function victims.next(band)
  send(key.victims[band])
  -- A version that does not keep the order leaves lanes in it that have drained, and out of it others.
  for _ = 1, VICTIMS_LOOKED_AT do
    local lane = redis.call('ZRANGE', key.victims[band], 0, 0)[1]
      or redis.call('ZRANGE', ahead.anew(key.flows[band]), 0, 0)[1]
    if not lane then return nil end
    local last = redis.call('ZRANGE', ahead.anew(key.queue[band][lane]), -1, -1)[1]
    if last then return lane, last end
    redis.call('ZREM', key.victims[band], lane)
  end
end
-- The sweep's part: when the pressure has ended so does the memory of who was preempted, `most` lanes of a band
-- a call. Returns whether there may be more.
function victims.relax(most)
  local more = false
  for band = 1, 2 do
    local places, lanes = key.victims[band], {}
    send(places)
    for _, lane in ipairs(redis.call('ZRANGEBYSCORE', places, '(0', '+inf', 'LIMIT', 0, most)) do
      lanes[#lanes + 1] = 0
      lanes[#lanes + 1] = lane
    end
    if #lanes > 0 then redis.call('ZADD', places, unpack(lanes)) end
    local idle = redis.call('ZREMRANGEBYRANK', key.preempted[band], 0, most - 1)
    more = more or #lanes == 2 * most or idle == most
  end
  return more
end
-- Lanes that a version without this order has filled come into it, `most` a call; in one version none are missing.
function victims.complete(most)
  for band = 1, 2 do
    local places, flows, lanes = key.victims[band], ahead.anew(key.flows[band]), {}
    send(places)
    if redis.call('ZCARD', places) < redis.call('ZCARD', flows) then
      for _, lane in ipairs(redis.call('ZRANDMEMBER', flows, most)) do
        lanes[#lanes + 1] = 0
        lanes[#lanes + 1] = lane
      end
      redis.call('ZADD', places, 'NX', unpack(lanes))
    end
    if pool[QUEUED[band]] == 0 then redis.call('UNLINK', places) end
  end
end
