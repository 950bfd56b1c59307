-- include: dispatch
-- Maintains the queue for the sweep: lowers tags, forgets old preemptions, drops strays, detects lost keys. The
-- argument `limit` bounds the work of each step.
-- Uses the queue from lib/flows.lua, records from lib/registry.lua, `throttle`, `marks` and `restore_running`. Defines
-- `upkeep` for the sweep and publish.

local upkeep = {}
do
  -- Tags only grow, and so does the rounding error of their sums. When the virtual time v passes REBASED_AT, all tags
  -- of the band are lowered by the same amount, which keeps their order. Records of running requests keep their higher
  -- tags; the `floor` of `queue.correct` allows for that.
  local REBASED_AT, REBASED_TO = 2 ^ 26, 2 ^ 20
  local MOST_REBASED = 30000 -- most tags of a band that is rebased; a band with more tags keeps its tags
  local function is_of_root(member) return not settings.tenants or tenants.parent(member) == '' end
  local function lower(set, by)
    local found = read('ZRANGE', set, 0, -1, 'WITHSCORES')
    for i = 1, #found, 2 do
      if is_of_root(found[i]) then defer_write('ZADD', set, found[i + 1] - by, found[i]) end
    end
  end

  function upkeep.rebase_tags(band)
    local by, count = pool[V[band]] - REBASED_TO, 0
    if by < REBASED_AT - REBASED_TO then return end
    local all = {key.flows[band], key.throttled[band], key.finish[band]}
    for _, set in ipairs(all) do count = count + read('ZCARD', set) end
    if count > MOST_REBASED then return end
    for _, set in ipairs(all) do lower(set, by) end
    throttle.each_waiting(function(of, flow_queue, waiting)
      local tag = of == band and is_of_root(flow_queue) and read('ZSCORE', waiting, flow_queue)
      if tag then defer_write('ZADD', waiting, tag - by, flow_queue) end
    end)
    pool[V[band]], pool[NEW[band]] = pool[V[band]] - by, math.max(pool[NEW[band]] - by, 0)
    log_flow_queue('rebased', band, '', by)
  end

  function upkeep.rebase_band_tags()
    local by = pool.bv - REBASED_TO
    if by < REBASED_AT - REBASED_TO then return end
    pool.bv = pool.bv - by
    for _, band in ipairs(BANDS) do pool[BAND_TAG[band]] = pool[BAND_TAG[band]] - by end
  end

  local MOST_IDLE = 10000 -- most finish tags kept for each band; also most preemption times
  -- Remove at most `limit` of the lowest members beyond MOST_IDLE, and return how many. The first `from` members do not
  -- count: the caller removes them.
  local function drop_lowest(set, from, limit)
    local surplus = math.min(redis.call('ZCARD', set) - from - MOST_IDLE, limit)
    if surplus > 0 then
      for _, flow_queue in ipairs(redis.call('ZRANGE', set, from, from + surplus - 1)) do
        defer_write('ZREM', set, flow_queue)
      end
    end
    return surplus
  end

  -- Drop finish tags at or below the virtual time v, which have no effect. In an idle pool v first moves to the highest
  -- finish tag, so that all flows start equal. If too many finish tags remain, drop the lowest tags; each is at most
  -- one charge above v. Also drop surplus preemption times. Return whether more entries may be left to drop.
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

  -- Reset preemption times once the queue is no longer nearly full. Return whether more preemption times may be left.
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

  -- Add missing preemption candidates: the set was lost, or a band became preemptible while requests waited in it.
  function upkeep.add_preemption_candidates(limit)
    for _, band in ipairs(BANDS) do
      local candidates, flows = key.candidates[band], key.flows[band]
      if (band > 0 or PREEMPTIBLE[0]) and read('ZCARD', candidates) < read('ZCARD', flows) then
        local flow_queues = read('ZRANDMEMBER', flows, limit)
        local scores = read('ZMSCORE', candidates, unpack(flow_queues))
        for i, flow_queue in ipairs(flow_queues) do
          if not scores[i] and not tenants.is_inner(flow_queue) then defer_write('ZADD', candidates, 0, flow_queue) end
        end
      end
      if pool[QUEUED[band]] == 0 then defer_unlink(candidates) end
    end
  end

  -- If no request waits in a band, drop all flow queues that the band still lists: they are strays.
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

-- Recovery after a key of the pool was lost, that is, evicted or deleted by hand. The sweep detects the loss, since
-- counts then disagree, and ends the epoch. The next publish rebuilds every key that derives from the records of
-- requests. Then replicas register their requests again, as after a FLUSHALL, which also restores lost records.
do
  local MOST_FILED = 10000 -- if more records exist, a call drops this many records, and replicas register them again
  local MOST_LOOKED_AT = 1000 -- do not compare counts of more flow queues, endpoints or running requests than this
  local LAST_BAND = 63

  local function is_waiting_lost()
    local flow_queues = 0
    for _, band in ipairs(BANDS) do
      local waiting = 0
      local has_all = queue.each_order(band, MOST_LOOKED_AT - flow_queues, function(members)
        flow_queues = flow_queues + #members / 2
        for i = 1, #members, 2 do waiting = waiting + read('ZCARD', key.queue[band][members[i]]) end
      end)
      if not has_all then return false end
      if waiting < pool[QUEUED[band]] then return true end
    end
    return false
  end

  -- Return whether the key `marks` was lost: a published endpoint takes no new requests, yet is neither draining nor
  -- marked.
  local function is_mark_lost()
    for set, stage in pairs({load = endpoints, prefill_load = prefill}) do
      local closed = read('ZRANGEBYSCORE', key[set], UNPICKABLE, '+inf', 'LIMIT', 0, MOST_LOOKED_AT)
      for _, address in ipairs(closed) do
        local description = read('HGET', key.endpoints, address)
        if description and stage.includes(description) and not endpoints.is_draining(description)
          and not marks.is_marked(address) then
          return true
        end
      end
    end
    return false
  end

  -- Return whether the key `prefill_load` or `prefills` was lost: both count the same reservations.
  local function is_prefill_lost()
    local listed, reserved = read('ZRANGE', key.prefill_load, 0, -1, 'WITHSCORES'), 0
    for i = 2, #listed, 2 do reserved = reserved + listed[i] % UNPICKABLE end
    return #listed / 2 < pool.prefillers or reserved ~= read('ZCARD', key.prefills)
  end

  -- Return whether the key `limits` was lost: its counts of a limited flow's requests, or of tokens, are too low.
  local function is_limit_lost()
    local is_counted = endpoints.counts_flows or settings.token_caps
    if not is_counted or read('ZCARD', key.inflight) > MOST_LOOKED_AT then return false end
    local ids, running = read('ZRANGE', key.inflight, 0, -1), {}
    record.prefetch(ids, #ids)
    for _, id in ipairs(ids) do
      local r = record.read(id)
      if r and r.limit > 0 then running[r.flow] = (running[r.flow] or 0) + 1 end
      local field = r and settings.token_caps and r.state == STATE_PLACED and joined('', endpoints.first(r.endpoints))
      if field then running[field] = (running[field] or -RESIDUE) + r.taken end
    end
    for flow, count in pairs(running) do
      if tonumber(read('HGET', key.limits, flow) or 0) < count then return true end
    end
    return false
  end

  -- The number of records is not the sum of leases and timers: compare the three keys with the counters, and return
  -- the lost key; nil if no counter is higher, since strays then cause the difference.
  local function lost_of_requests()
    local queued, stock = 0, 0
    for _, set in ipairs({key.timers, key.inflight}) do
      local ids = read('ZRANGE', set, 0, MOST_LOOKED_AT)
      if #ids > MOST_LOOKED_AT then return 'requests' end
      record.prefetch(ids, #ids)
      for _, id in ipairs(ids) do
        local r = record.read(id)
        if r and r.state == STATE_QUEUED then queued = queued + 1 elseif r then stock = stock + r.taken end
      end
    end
    local has_records = read('HLEN', key.requests) >= pool.queued
    if queued < pool.queued then return has_records and 'timers' or 'requests' end
    return stock < pool.stock - 1e-6 and 'inflight' or nil
  end

  -- Return the name of a lost key, or of a key that derives from the lost key; nil if all counts agree.
  function upkeep.find_lost_key()
    local lost = nil
    if read('HLEN', key.requests) ~= read('ZCARD', key.inflight) + read('ZCARD', key.timers) then
      lost = lost_of_requests()
    end
    if lost then return lost end
    if read('ZCARD', key.overdue) < pool.overdue then return 'overdue' end
    local published = read('HLEN', key.endpoints)
    if read('ZCARD', key.load) < published then return 'load' end
    if read('ZCOUNT', key.load, '-inf', UNPICKABLE) > published then return 'endpoints' end
    if is_mark_lost() then return 'marks' end
    if is_prefill_lost() then return 'prefill_load' end
    if pool.refiling == 0 and is_waiting_lost() then return 'queue' end
    if is_limit_lost() then return 'limits' end
    return read('HGET', key.pool, 'lost') or nil
  end

  local function add_flow_queue(names, band, flow_queue)
    for _, kind in ipairs({'queue', 'growing', 'static'}) do names[#names + 1] = key[kind][band][flow_queue] end
  end

  -- Add the keys of a band's flow queues to `names`. Keep the tags of members as finish tags, unless the key `pool`,
  -- with the virtual times, was lost. (A throttled member below an inner node loses its tag.)
  local function keep_tags(band, names, lost)
    queue.each_order(band, math.huge, function(members, parent)
      local finish = parent == '' and key.finish[band] or key.finished[band][parent]
      for i = 1, #members, 2 do
        add_flow_queue(names, band, members[i])
        if lost ~= '' then redis.call('ZADD', finish, 'GT', members[i + 1], members[i]) end
      end
    end)
    tenants.add_keys(band, names, lost == '')
  end

  -- Remove every key that derives from the records. Return the records and the name of the lost key ('' for `pool`
  -- itself); nil if there are more than MOST_FILED records, of which this call has only dropped some.
  function upkeep.take_records()
    local lost, names, records = read('HGET', key.pool, 'lost') or '', {}, {}
    local too_many = read('HLEN', key.requests) > MOST_FILED
    local found = too_many and read('HSCAN', key.requests, '0', 'COUNT', MOST_FILED)[2] or read('HGETALL', key.requests)
    for i = 1, #found, 2 do
      local r = {id = found[i], due_ms = false, tenancy = 0}
      if pcall(unpack_record, r, found[i + 1]) then
        records[#records + 1] = r
        add_flow_queue(names, r.band, r.flow)
        names[#names + 1] = key.line(r.band, r.flow, r.workload)
        names[#names + 1] = key.line(r.band, '', r.workload)
      end
      if too_many then defer_write('HDEL', key.requests, r.id) end
    end
    for band = 0, LAST_BAND do
      keep_tags(band, names, lost)
      add_flow_queue(names, band, '')
      for _, kind in ipairs({'flows', 'throttled', 'candidates', 'preempted'}) do
        names[#names + 1] = key[kind][band]
      end
      if lost == '' then names[#names + 1] = key.finish[band] end
    end
    throttle.each_waiting(function(_, _, waiting) names[#names + 1] = waiting end)
    for _, name in ipairs({'inflight', 'timers', 'overdue', 'limits', 'load', 'prefill_load', 'prefills', 'blockers',
      'pending', 'log'}) do
      names[#names + 1] = key[name]
    end
    if lost == 'workloads' then names[#names + 1] = key.workloads end
    for i = 1, #names, MOST_LOOKED_AT do
      redis.call('UNLINK', unpack(names, i, math.min(i + MOST_LOOKED_AT - 1, #names)))
    end
    if too_many then return nil end
    cache_is_valid = false
    reset_caches()
    return records, lost
  end

  local function file(r)
    if not record.is_waiting(r) then return restore_running(r) end
    if r.band > LAST_NAMED then bands.count_request(r.band, 1) end
    if r.state == STATE_QUEUED then
      queue.insert(r)
      record.put(r) -- the record must be written again, since queue.insert has changed its bytes_epoch
    else
      timers.set(r.id, math.min(r.deadline_ms, now_ms + settings.lease_ms))
    end
  end

  -- Rebuild the keys from the records that `take_records` has returned, once settings and endpoints are published. Drop
  -- a record whose band is unknown: its replica registers the request again.
  function upkeep.file_records(records, lost)
    pool.stock, pool.queued, pool.overdue, pool.refiling = 0, 0, 0, 0
    bands.begin_count(now_us)
    pool.note_possible_loss()
    if records[1] then pool.log_seq = pool.log_seq + 1 end -- the gap in `seq` shows that the new log lacks decisions
    for _, r in ipairs(records) do
      if PRIORITY[r.band] then
        record.know(r)
        file(r)
        if lost == 'workloads' then workloads.restored(r.workload) end
      else
        record.remove(r)
      end
    end
    if settings.tenants then quotas.recount(records) end
    if read('HLEN', key.marks) > 0 then -- a new version makes replicas read the marks
      local version = tonumber(read('HGET', key.pool, 'marks_version') or 0) or 0
      defer_write('HSET', key.pool, 'marks_version', version + 1)
    end
    defer_write('HDEL', key.pool, 'lost')
  end
end
