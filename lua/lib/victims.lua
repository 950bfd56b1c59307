-- include: pool ahead
-- Who gives way where the queue is full: `victims` has every backlogged lane below Critical by when it was last
-- preempted, kept as lanes come and go, so that no call ever has to put it together. Lanes that have drained
-- since are remembered in `preempted`, while there is pressure.
local victims = {}
do
  function victims.expose(band, lane)
    local last = pool.pressed == 1 and redis.call('ZSCORE', ahead.anew(key.preempted[band]), lane)
    if last then later('ZREM', key.preempted[band], lane) end
    later('ZADD', key.victims[band], last or 0, lane)
  end
  function victims.shield(band, lane)
    if pool.pressed == 1 then
      send(key.victims[band])
      local last = redis.call('ZSCORE', key.victims[band], lane)
      if tonumber(last or 0) > 0 then later('ZADD', key.preempted[band], last, lane) end
    end
    later('ZREM', key.victims[band], lane)
  end
  -- The lane to be preempted next, and its newest request (under edf, that with the latest deadline); nil if there is
  -- none.
  function victims.next(band)
    send(key.victims[band])
    -- A version that does not keep the order leaves lanes in it that have drained, and out of it others.
    for _ = 1, STRAYS do
      local victim = redis.call('ZRANGE', key.victims[band], 0, 0)[1]
      local lane = victim or redis.call('ZRANGE', ahead.anew(key.flows[band]), 0, 0)[1]
      if not lane then return nil end
      local last = redis.call('ZRANGE', ahead.anew(key.queue[band][lane]), -1, -1)[1]
      if last then return lane, last end
      drop_stray('ZREM', victim and key.victims[band] or key.flows[band], lane)
    end
  end
  -- The sweep's part: when the pressure has ended so does the memory of who was preempted, `most` lanes of a band
  -- a call. Returns whether there may be more.
  function victims.relax(most)
    local more = false
    for band = 1, 2 do
      local places = key.victims[band]
      send(places)
      local lanes = redis.call('ZRANGEBYSCORE', places, '(0', '+inf', 'LIMIT', 0, most)
      for _, lane in ipairs(lanes) do later('ZADD', places, 0, lane) end
      local idle = redis.call('ZRANGE', ahead.anew(key.preempted[band]), 0, most - 1)
      for _, lane in ipairs(idle) do later('ZREM', key.preempted[band], lane) end
      more = more or #lanes == most or #idle == most
    end
    return more
  end
  -- Lanes that a version without this order has filled come into it, `most` a call; in one version none are missing.
  function victims.complete(most)
    for band = 1, 2 do
      local places, flows = key.victims[band], ahead.anew(key.flows[band])
      send(places)
      if redis.call('ZCARD', places) < redis.call('ZCARD', flows) then
        local lanes = redis.call('ZRANDMEMBER', flows, most)
        local known = redis.call('ZMSCORE', places, unpack(lanes))
        for i, lane in ipairs(lanes) do
          if not known[i] then later('ZADD', places, 0, lane) end
        end
      end
      if pool[QUEUED[band]] == 0 then unlink_later(places) end
    end
  end
end
