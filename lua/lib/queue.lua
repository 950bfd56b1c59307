-- include: order log victims timers
-- The queue: bands, in each band lanes ordered by start tag, in each lane requests by the ordering.
-- Start-time fair queueing (Goyal, Vin, Cheng, 1996; several servers: Jin, Chase, Kaur, SFQ(D), 2004):
-- a lane that becomes backlogged starts at S = max(v, F); serving it sets v = S and F = S + share.
-- One tag a lane: a request that leaves early leaves no hole. docs/fairness.md has the proofs.
local queue = {}
local forget_lengths
do
  -- What serving r costs its lane. Weights and costs that a former version has let in, or nobody has checked, count as
  -- the nearest that the arithmetic bears.
  local LEAST_WEIGHT, MOST_WEIGHT, MOST_COST = 1e-3, 1e6, 1e9
  local function within(number, least, most)
    if number >= least and number <= most then return number end
    return number > most and most or least -- the least too for what is no number
  end
  function queue.share(r)
    if settings.fairness == 'round-robin' then return 1 end
    local cost = within(r.cost, 0, MOST_COST)
    if settings.fairness == 'none' then return cost end
    return cost / within(settings.weights[r.flow] or r.weight, LEAST_WEIGHT, MOST_WEIGHT)
  end
  function queue.cost(cost) return within(cost, 0, MOST_COST) end
  -- The sweep's part: tags that are no finite number, or beyond what sums of years reach, go to the others' level.
  local MOST_TAG = 2 ^ 62
  local HEALED = 100 -- of a set, a call
  local function is_sound(tag) return tag > -MOST_TAG and tag < MOST_TAG end
  function queue.heal(band)
    local flows = ahead.anew(key.flows[band])
    local least = redis.call('ZRANGEBYSCORE', flows, '(' .. full(-MOST_TAG), '(' .. full(MOST_TAG), 'WITHSCORES',
      'LIMIT', 0, 1)
    local level = tonumber(least[2] or 0)
    if is_sound(pool[V[band]]) then level = pool[V[band]] else pool[V[band]] = level end
    if not is_sound(pool[NEW[band]]) then pool[NEW[band]] = level end
    if not (is_sound(pool[BAND_TAG[band]]) and is_sound(pool.bv)) then
      pool.bv = 0
      for _, each in ipairs(BANDS) do pool[BAND_TAG[each]] = 0 end
    end
    for _, places in ipairs({flows, key.parked[band], key.finish[band]}) do
      ahead.anew(places)
      for _, range in ipairs({{full(MOST_TAG), '+inf'}, {'-inf', full(-MOST_TAG)}}) do
        for _, lane in ipairs(redis.call('ZRANGEBYSCORE', places, range[1], range[2], 'LIMIT', 0, HEALED)) do
          later('ZADD', places, level, lane)
        end
      end
    end
  end
  -- The sweep's part: tags only grow, and what a sum of doubles is off by grows with them. When v has passed REBASED_AT
  -- all tags of the band are less by one amount, which changes nothing of their order. What running requests remember
  -- of theirs is then too high, which `correct` bears. Not beside a version that would take it for their place.
  local REBASED_AT, REBASED_TO = 2 ^ 26, 2 ^ 20
  local MOST_REBASED = 30000 -- tags; of more, when there are fewer
  local function lower(places, by)
    local found = redis.call('ZRANGE', ahead.anew(places), 0, -1, 'WITHSCORES')
    for i = 1, #found, 2 do later('ZADD', places, found[i + 1] - by, found[i]) end
  end
  local function lower_blocked(band, by)
    send(key.blockers)
    local found = redis.call('HGETALL', key.blockers)
    for i = 1, #found, 2 do
      local of, lane = string.match(found[i], '^(%d)\31(.*)$')
      for address in string.gmatch(of == tostring(band) and found[i + 1] or '', '[^,]+') do
        local places = ahead.anew(key.blocked[band][address])
        local tag = redis.call('ZSCORE', places, lane)
        if tag then later('ZADD', places, tag - by, lane) end
      end
    end
  end
  function queue.rebase(band)
    local by, count = pool[V[band]] - REBASED_TO, 0
    if by < REBASED_AT - REBASED_TO or pool.is_mixed() then return end
    local all = {key.flows[band], key.parked[band], key.finish[band]}
    for _, places in ipairs(all) do count = count + redis.call('ZCARD', ahead.anew(places)) end
    if count > MOST_REBASED then return end
    for _, places in ipairs(all) do lower(places, by) end
    lower_blocked(band, by)
    pool[V[band]], pool[NEW[band]] = pool[V[band]] - by, math.max(pool[NEW[band]] - by, 0)
    log_lane('rebased', band, '', by)
  end
  function queue.rebase_bands()
    local by = pool.bv - REBASED_TO
    if by < REBASED_AT - REBASED_TO then return end
    pool.bv = pool.bv - by
    for _, band in ipairs(BANDS) do pool[BAND_TAG[band]] = pool[BAND_TAG[band]] - by end
  end
  function queue.lane(r) return settings.fairness == 'none' and '' or r.flow end
  -- The lane that r stands in: while requests are being refiled it may still be the one of the former policy.
  local function standing_lane(r)
    local lane, lanes = queue.lane(r), key.queue[r.band]
    if pool.refiling == 0 or redis.call('ZSCORE', ahead.anew(lanes[lane]), r.id) then return lane end
    local other = lane == '' and r.flow or ''
    return redis.call('ZSCORE', ahead.anew(lanes[other]), r.id) and other or lane
  end
  local lengths = {} -- of lanes, by the key of their requests, as this call knows them
  local standing = {} -- those of them that this call knows to have their place in the order
  function forget_lengths()
    if next(lengths) then lengths = {} end
    if next(standing) then standing = {} end
  end
  function queue.length(band, lane)
    local requests = key.queue[band][lane]
    local length = lengths[requests]
    if not length then
      length = redis.call('ZCARD', ahead.anew(requests))
      lengths[requests] = length
    end
    return length
  end
  -- How many lanes have something waiting, in all bands.
  function queue.flows()
    local count = 0
    for _, band in ipairs(BANDS) do
      for _, lanes in ipairs({key.flows[band], key.parked[band]}) do
        count = count + redis.call('ZCARD', ahead.anew(lanes))
      end
    end
    return count
  end
  function queue.due_ms(r)
    local arrived, deadline_ms, patience_ms = r.arrived, r.deadline_ms, settings.starvation_ms
    local arrived_ms = (arrived - arrived % 1000) / 1000
    if patience_ms == 0 then
      local left_ms = deadline_ms - arrived_ms
      patience_ms = (left_ms - left_ms % 2) / 2
    end
    local due_ms = arrived_ms + patience_ms
    return due_ms < deadline_ms and due_ms or deadline_ms
  end
  local function grow(band, change)
    local counters, name = pool, QUEUED[band]
    counters.queued, counters[name] = counters.queued + change, counters[name] + change
  end
  -- Where a lane begins that becomes backlogged with r, having last been charged up to `finish`. One that is owed
  -- nothing starts at v, ahead of all that have been served since; so a client with a new flow for each request
  -- would hold v where it is and the others off. Those that start so are therefore counted like one flow of weight
  -- 1 (`new`), and when they are NEWCOMERS ahead of v the next start a share later, as if they had been served once.
  local NEWCOMERS = 100
  local function start_tag(r, finish)
    local v, new, share = pool[V[r.band]], NEW[r.band], queue.share(r)
    if finish > v then return finish end
    local reached = math.max(pool[new], v)
    if reached - v >= NEWCOMERS * share then return v + share end
    pool[new] = reached + share
    return v
  end
  -- A lane takes its place in the order. A band that had none to serve has no claim to the turns it missed.
  local function join(band, lane, tag)
    local flows, name = key.flows[band], BAND_TAG[band]
    if pool[name] < pool.bv and redis.call('ZCARD', ahead.anew(flows)) == 0 then pool[name] = pool.bv end
    ahead.forget(flows)
    later('ZADD', flows, tag, lane)
  end
  -- Whether a lane in which ids stand is in the order.
  local function has_place(band, lane)
    return redis.call('ZSCORE', ahead.anew(key.flows[band]), lane)
      or redis.call('ZSCORE', ahead.anew(key.parked[band]), lane)
  end
  -- Put r in at its place. Returns the lane's start tag if it has just become backlogged. Its record is
  -- written by the caller. Writes are put off to the end of the call, so that one which fails halfway, and is then
  -- repeated, has left nothing of it; what may be left all the same is dropped at its turn (`drop_stray`).
  function queue.insert(r)
    local band, lane = r.band, settings.fairness == 'none' and '' or r.flow
    local requests = key.queue[band][lane]
    local length = lengths[requests] or queue.length(band, lane)
    local is_new = length == 0 or not (standing[requests] or has_place(band, lane)) -- or only strays are there
    standing[requests] = true
    if fronts[requests] then ahead.forget(requests) end
    later('ZADD', requests, order.score(r), r.id)
    lengths[requests] = length + 1
    if settings.ordering == 'workload-aware' then
      known_records[r.id] = r
      order.insert(r, lane)
    end
    local due_ms = queue.due_ms(r)
    r.due_ms = due_ms
    timers.set(r.id, due_ms)
    grow(band, 1)
    if not is_new then return nil end
    send(key.finish[band])
    local tag = start_tag(r, tonumber(redis.call('ZSCORE', key.finish[band], lane) or 0))
    join(band, lane, tag)
    if band > 0 then victims.expose(band, lane) end
    return tag
  end
  local function retire(band, lane, tag)
    ahead.move(key.flows[band], lane)
    later('ZADD', key.finish[band], tag, lane)
    if band > 0 then victims.shield(band, lane) end
  end
  -- Take r off everything that orders it in the lane in which it stands. Returns whether that is now empty.
  local function unqueue(r, lane)
    local id, band = r.id, r.band
    local requests = key.queue[band][lane]
    local emptied, left = ahead.leave(requests, id), lengths[requests]
    if left then
      lengths[requests], emptied = left - 1, left == 1
    elseif emptied == nil then
      emptied = queue.length(band, lane) == 0
    end
    if settings.ordering == 'workload-aware' or pool.refiling == 1 then order.remove(r, lane) end
    timers.stop(id)
    if pool.overdue > 0 and write_now('ZREM', key.overdue, id) then pool.overdue = pool.overdue - 1 end
    grow(band, -1)
    return emptied
  end
  -- A parked lane waits for no endpoint any more. Lanes wait for some only where endpoints have limits, or had.
  function queue.forget_blockers(band, lane)
    local name = joined(band, lane)
    send(key.blockers)
    local blockers = redis.call('HGET', key.blockers, name)
    if not blockers then return end
    later('HDEL', key.blockers, name)
    for address in string.gmatch(blockers, '[^,]+') do later('ZREM', key.blocked[band][address], lane) end
  end
  local function retire_empty(band, lane)
    local tag = redis.call('ZSCORE', ahead.anew(key.flows[band]), lane)
    if not tag then
      tag = redis.call('ZSCORE', ahead.anew(key.parked[band]), lane)
      write_now('ZREM', key.parked[band], lane)
      queue.forget_blockers(band, lane)
    end
    if tag then retire(band, lane, tag) end
  end
  -- Take r out without serving it: its lane's tag stays as it is.
  function queue.remove(r)
    local lane = standing_lane(r)
    if unqueue(r, lane) then retire_empty(r.band, lane) end
  end
  -- Take out an id that no queued request has.
  function queue.drop_stray(id, band, lane)
    local requests = ahead.anew(key.queue[band][lane])
    drop_stray('ZREM', requests, id)
    for _, index in ipairs({key.growing, key.static}) do write_now('ZREM', index[band][lane], id) end
    lengths[requests] = redis.call('ZCARD', requests)
    if lengths[requests] == 0 then retire_empty(band, lane) end
  end
  -- Take r out and charge it to its lane, whose start tag is `tag`. The turn of a lane (`turn_of`) moves v to
  -- the tag; what the guard serves out of turn (nil) does not.
  function queue.serve(r, tag, turn_of)
    local lane, band, share = turn_of or standing_lane(r), r.band, queue.share(r)
    local emptied = unqueue(r, lane)
    if turn_of and tag > pool[V[band]] then pool[V[band]] = tag end
    if emptied then
      retire(band, lane, tag + share)
    else
      ahead.move(key.flows[band], lane, tag + share)
    end
    if settings.band_policy == 'weighted' then
      if turn_of then pool.bv = math.max(pool.bv, pool[BAND_TAG[band]]) end
      queue.charge_band(r, r.cost)
    end
    return share
  end
  -- Change what a lane has been charged by `difference`; `floor` is the least its tag can be. A lane without a tag has
  -- had none above v. Returns the lane's tag after it.
  function queue.correct(r, lane, difference, floor)
    for _, place in ipairs({key.flows[r.band], key.parked[r.band], key.finish[r.band]}) do
      local tag = redis.call('ZSCORE', ahead.anew(place), lane)
      remember(place, lane, tag)
      if tag then
        later('ZADD', place, tag + difference, lane)
        return tag + difference
      end
    end
    local tag = math.min(floor, pool[V[r.band]]) + difference
    later('ZADD', key.finish[r.band], tag, lane)
    return tag
  end
  -- Charge its band `cost` more, where bands have shares; negative, it takes back what was charged.
  function queue.charge_band(r, cost)
    if settings.band_policy ~= 'weighted' then return end
    local name = BAND_TAG[r.band]
    pool[name] = pool[name] + cost / within(settings.band_weights[r.band + 1], LEAST_WEIGHT, MOST_WEIGHT)
  end
  -- A lane whose flow is at its limit, or the endpoints of its next request, leaves the order, and comes back without
  -- a claim to what it missed.
  function queue.park(band, lane, tag)
    ahead.move(key.flows[band], lane)
    later('ZADD', key.parked[band], tag, lane)
    log_lane('parked', band, lane, tag)
  end
  -- Returns whether it was parked.
  function queue.unpark(band, lane)
    local tag = redis.call('ZSCORE', ahead.anew(key.parked[band]), lane)
    if not tag then return false end
    queue.forget_blockers(band, lane)
    if queue.length(band, lane) == 0 then
      drop_stray('ZREM', key.parked[band], lane)
      return false
    end
    write_now('ZREM', key.parked[band], lane)
    tag = math.max(pool[V[band]], tonumber(tag))
    join(band, lane, tag)
    log_lane('unparked', band, lane, tag)
    return true
  end
  -- A parked lane waits for a place on one of the endpoints `closed`. Of many, the first will do: the sweep looks too.
  function queue.block(band, lane, tag, closed)
    if #closed == 0 then return end
    local name, added = joined(band, lane), {}
    send(key.blockers)
    local blockers = redis.call('HGET', key.blockers, name)
    if blockers then added[1] = blockers end
    for i = 1, math.min(#closed, 16) do
      local lanes = ahead.anew(key.blocked[band][closed[i]])
      if not redis.call('ZSCORE', lanes, lane) then added[#added + 1] = closed[i] end
      later('ZADD', lanes, tag, lane)
    end
    later('HSET', key.blockers, name, table.concat(added, ','))
  end
  -- Keep a silent replica's request for whoever brings its id, out of the order until then. Its own deadline
  -- stays in its record: whoever adopts it has the rest of its TTL.
  function queue.hold(r, until_ms)
    queue.remove(r)
    r.state = 'held'
    timers.set(r.id, math.min(r.deadline_ms, until_ms))
    record.write(r)
    log('held', r)
  end
  -- The walk of a changed policy has come by: stand where the policy now in force would have put r.
  function queue.refile(r)
    local lane = standing_lane(r)
    if lane ~= queue.lane(r) then
      queue.remove(r)
      queue.insert(r)
    else
      local requests = key.queue[r.band][lane]
      ahead.forget(requests)
      later('ZADD', requests, order.score(r), r.id)
      order.remove(r, lane)
      if settings.ordering == 'workload-aware' then order.insert(r, lane) end
    end
  end
  -- The bands in the order in which they come next.
  local function bands_in_turn()
    if settings.band_policy ~= 'weighted' then return BANDS end
    local bands = {unpack(BANDS)}
    table.sort(bands, function(a, b)
      local tag_a, tag_b = pool[BAND_TAG[a]], pool[BAND_TAG[b]]
      return tag_a < tag_b or (tag_a == tag_b and a < b)
    end)
    return bands
  end
  -- An endpoint that was at its limit has a place: for the lane that has waited for it and would be next.
  function queue.unblock(address)
    for _, band in ipairs(bands_in_turn()) do
      for _ = 1, STRAYS do
        local lanes = ahead.anew(key.blocked[band][address])
        local lane = redis.call('ZRANGE', lanes, 0, 0)[1]
        if not lane then break end
        if queue.unpark(band, lane) then return end
        if redis.call('ZSCORE', ahead.anew(lanes), lane) then drop_stray('ZREM', lanes, lane) end
      end
    end
  end
  -- Read what up to `count` turns are likely to need: the lanes whose turn is near, and the records of those who are
  -- then served if each lane has its part of the turns.
  function queue.look_ahead(count)
    ahead.expect(count)
    if count < 2 or settings.ordering == 'workload-aware' then return end
    local bands, at = bands_in_turn(), 1
    while at < 3 and pool[QUEUED[bands[at]]] == 0 do at = at + 1 end
    local band, ids = bands[at], {}
    local lanes, requests = ahead.front(key.flows[band]), key.queue[band]
    local each, odd = math.floor(2 * count / #lanes), 2 * count % #lanes
    for i = 1, #lanes, 2 do
      local part = i < odd and each + 1 or each
      ahead.members(requests[lanes[i]], part, ids)
    end
    record.prefetch(ids, #ids)
  end
  -- Whose turn it is: an id, its lane's start tag, its band and lane; nil when nobody can be served.
  function queue.turn()
    local bands = settings.band_policy == 'weighted' and bands_in_turn() or BANDS
    for i = 1, 3 do
      local band = bands[i]
      if pool[QUEUED[band]] > 0 then
        local lane, tag = ahead.scored(key.flows[band])
        for _ = 1, STRAYS do
          if not lane then break end
          local id = settings.ordering == 'workload-aware' and order.head(band, lane)
            or ahead.member(key.queue[band][lane])
          if id then return id, tag, band, lane end
          strays = strays + 1 -- nobody waits there
          ahead.move(key.flows[band], lane)
          lane, tag = ahead.scored(key.flows[band])
        end
      end
    end
  end
  -- The most overdue request of the whole queue whose lane is not parked; nil if there is none near the front.
  local GUARD_LOOKS_AT = 16
  function queue.most_overdue()
    for _, id in ipairs(redis.call('ZRANGE', key.overdue, 0, GUARD_LOOKS_AT - 1)) do
      local r = record.read(id)
      if r and r.state == 'queued' then
        local tag = redis.call('ZSCORE', ahead.anew(key.flows[r.band]), standing_lane(r))
        if tag then return id, tonumber(tag) end
      else
        drop_stray('ZREM', key.overdue, id)
        pool.overdue = redis.call('ZCARD', key.overdue) -- it may have been counted
      end
    end
  end
end
