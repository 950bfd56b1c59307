-- include: queue
-- The sweep's maintenance of the queue: tags, preemption history, strays. `limit` bounds each step.

local upkeep = {}
do
  local MOST_TAG = 2 ^ 62
  local HEALED = 100 -- tags of a set per call
  local function is_sound(tag) return tag > -MOST_TAG and tag < MOST_TAG end

  -- Replace tags that are not finite, or higher than years of use can make them, by v or, if v is such a tag, by the
  -- lowest sound tag.
  function upkeep.heal_tags(band)
    local flows = key.flows[band]
    local least = read('ZRANGEBYSCORE', flows, '(' .. exact(-MOST_TAG), '(' .. exact(MOST_TAG), 'WITHSCORES',
      'LIMIT', 0, 1)
    local level = tonumber(least[2] or 0)
    if is_sound(pool[V[band]]) then level = pool[V[band]] else pool[V[band]] = level end
    if not is_sound(pool[NEW[band]]) then pool[NEW[band]] = level end
    if not (is_sound(pool[BAND_TAG[band]]) and is_sound(pool.bv)) then
      pool.bv = 0
      for _, each in ipairs(BANDS) do pool[BAND_TAG[each]] = 0 end
    end
    for _, set in ipairs({flows, key.throttled[band], key.finish[band]}) do
      for _, range in ipairs({{exact(MOST_TAG), '+inf'}, {'-inf', exact(-MOST_TAG)}}) do
        for _, flow_queue in ipairs(read('ZRANGEBYSCORE', set, range[1], range[2], 'LIMIT', 0, HEALED)) do
          defer_write('ZADD', set, level, flow_queue)
        end
      end
    end
  end

  -- Tags only grow, and so does the rounding error of their sums. When v passes REBASED_AT, all tags of the band are
  -- lowered by the same amount, which keeps their order. Records of running requests keep their higher tags; the
  -- `floor` of `queue.correct` allows for that.
  local REBASED_AT, REBASED_TO = 2 ^ 26, 2 ^ 20
  local MOST_REBASED = 30000 -- tags; a band with more is left until it has fewer
  local function lower(set, by)
    local found = read('ZRANGE', set, 0, -1, 'WITHSCORES')
    for i = 1, #found, 2 do defer_write('ZADD', set, found[i + 1] - by, found[i]) end
  end

  local function lower_blocked(band, by)
    local found = read('HGETALL', key.blockers)
    for i = 1, #found, 2 do
      local of, flow_queue = string.match(found[i], '^(%d+)\31(.*)$')
      for address in string.gmatch(of == tostring(band) and found[i + 1] or '', '[^,]+') do
        local waiting = key.blocked[band][address]
        local tag = read('ZSCORE', waiting, flow_queue)
        if tag then defer_write('ZADD', waiting, tag - by, flow_queue) end
      end
    end
  end

  function upkeep.rebase_tags(band)
    local by, count = pool[V[band]] - REBASED_TO, 0
    if by < REBASED_AT - REBASED_TO then return end
    local all = {key.flows[band], key.throttled[band], key.finish[band]}
    for _, set in ipairs(all) do count = count + read('ZCARD', set) end
    if count > MOST_REBASED then return end
    for _, set in ipairs(all) do lower(set, by) end
    lower_blocked(band, by)
    pool[V[band]], pool[NEW[band]] = pool[V[band]] - by, math.max(pool[NEW[band]] - by, 0)
    log_flow_queue('rebased', band, '', by)
  end

  function upkeep.rebase_band_tags()
    local by = pool.bv - REBASED_TO
    if by < REBASED_AT - REBASED_TO then return end
    pool.bv = pool.bv - by
    for _, band in ipairs(BANDS) do pool[BAND_TAG[band]] = pool[BAND_TAG[band]] - by end
  end


  local MOST_IDLE = 10000 -- finish tags, and preemption times, that are kept for each band
  -- Remove the lowest members beyond MOST_IDLE. The first `from` are being removed already. Returns how many.
  local function drop_lowest(set, from, limit)
    local surplus = math.min(read_stored('ZCARD', set) - from - MOST_IDLE, limit)
    if surplus > 0 then
      for _, flow_queue in ipairs(read_stored('ZRANGE', set, from, from + surplus - 1)) do
        defer_write('ZREM', set, flow_queue)
      end
    end
    return surplus
  end

  -- Drop finish tags at or below v, which have no effect. In an idle pool no flow queue owes anything, so v moves to
  -- the highest of them. If there are too many, drop the lowest; each is at most one charge above v. Returns whether
  -- there may be more.
  function upkeep.drop_finish_tags(band, limit)
    local v, finish = pool[V[band]], key.finish[band]
    flush(finish)
    if pool.queued == 0 and pool.stock == 0 then
      local top = read('ZRANGE', finish, -1, -1, 'WITHSCORES')
      if top[2] then v = math.max(v, tonumber(top[2])) end
      pool[V[band]] = v
    end
    local stale = read('ZRANGEBYSCORE', finish, '-inf', v, 'LIMIT', 0, limit)
    for _, flow_queue in ipairs(stale) do defer_write('ZREM', finish, flow_queue) end
    local surplus = drop_lowest(finish, #stale, limit)
    flush(key.preempted[band])
    local forgotten = drop_lowest(key.preempted[band], 0, limit)
    return #stale == limit or surplus == limit or forgotten == limit
  end

  -- The pressure has ended: forget who was preempted when. Returns whether there may be more.
  function upkeep.forget_preemptions(limit)
    local more = false
    for _, band in ipairs(BANDS) do
      local candidates = key.candidates[band]
      local flow_queues = read('ZRANGEBYSCORE', candidates, '(0', '+inf', 'LIMIT', 0, limit)
      for _, flow_queue in ipairs(flow_queues) do defer_write('ZADD', candidates, 0, flow_queue) end
      local idle = read('ZRANGE', key.preempted[band], 0, limit - 1)
      for _, flow_queue in ipairs(idle) do defer_write('ZREM', key.preempted[band], flow_queue) end
      more = more or #flow_queues == limit or #idle == limit
    end
    return more
  end

  -- Add the candidates that are missing: those from before Critical became preemptible, or all if the set was lost.
  function upkeep.add_preemption_candidates(limit)
    for _, band in ipairs(BANDS) do
      local candidates, flows = key.candidates[band], key.flows[band]
      if (band > 0 or PREEMPTIBLE[0]) and read('ZCARD', candidates) < read('ZCARD', flows) then
        local flow_queues = read('ZRANDMEMBER', flows, limit)
        local scores = read('ZMSCORE', candidates, unpack(flow_queues))
        for i, flow_queue in ipairs(flow_queues) do
          if not scores[i] then defer_write('ZADD', candidates, 0, flow_queue) end
        end
      end
      if pool[QUEUED[band]] == 0 then defer_unlink(candidates) end
    end
  end

  -- While nobody waits in a band its flow queues are strays, and so is what is overdue while nobody waits at all.
  function upkeep.drop_stray_flow_queues(band, limit)
    if pool[QUEUED[band]] > 0 then return end
    for _, set in ipairs({key.flows[band], key.throttled[band]}) do
      for _, flow_queue in ipairs(read('ZRANGE', set, 0, limit - 1)) do
        for _, id in ipairs(read('ZRANGE', key.queue[band][flow_queue], 0, limit - 1)) do
          local r = record.read(id)
          if not (r and r.state == STATE_QUEUED) then queue.drop_stray(id, band, flow_queue) end
        end
        if queue.length(band, flow_queue) == 0 then drop_stray('ZREM', set, flow_queue) end
      end
    end
  end

  function upkeep.drop_stray_overdue(limit)
    if pool.queued > 0 then return end
    pool.overdue = 0
    for _, id in ipairs(read('ZRANGE', key.overdue, 0, limit - 1)) do drop_stray('ZREM', key.overdue, id) end
  end
end
