-- include: ends usage
-- Begins and ends every script call: runs due timers, dispatches requests, commits the writes. This file also places
-- requests. If a call fails before it starts to commit, `run` undoes its writes. This file uses the queue from
-- lib/flows.lua, the choice of an endpoint from lib/endpoints.lua, ends from lib/ends.lua. This file defines
-- `place_request`, `place_granted`, `run_timers`, `finish_call`, `for_each_item`, `column` and `run`.

-- Choose and reserve an endpoint for request r in one step, so that two replicas never both take the same idle endpoint
-- (G1). If `split` names candidates ('': none), also choose and reserve a prefill endpoint. If no other endpoint is
-- ready for the prefill, do not split the request. Return 'placed a,b,c LOADS', for a split request 'placed a,b,c>x,y
-- LOADS'; or nil, whether only a limit prevents the placement, and the endpoints that are at their own limit (prefill
-- endpoints under their names by `throttle.prefill_of`). The caller of place_request counts the request in the stock
-- and in the flow's requests in flight.
local function place_request(r, candidates, split, turn, picks)
  local picked, seen, endpoint = endpoints.pick(r, candidates, turn, picks)
  if not picked then return nil, seen, endpoint end
  local prefillers = ''
  if split ~= '' then
    local closed
    prefillers, closed = stages.choose_prefill(split, endpoint, turn, picks)
    if not prefillers then return nil, true, closed end
  end
  local granted = r.state == STATE_GRANTED
  r.endpoints, r.state, r.prefillers = picked, STATE_PLACED, prefillers
  endpoints.reserve(endpoint, r.taken)
  if prefillers ~= '' then stages.reserve_prefill(r) end
  if r.limit > 0 then endpoints.count_flow(r, endpoint, 1) end
  record.put(r)
  if granted and settings.log_max > 0 then log_event('placed', r) end
  if settings.tenants then seen = seen .. quotas.shown(r) end
  if prefillers ~= '' then picked = picked .. stages.SPLIT .. prefillers end
  return 'placed ' .. picked .. ' ' .. seen
end

-- Place a granted request, or return it to its position in the queue and refund its charge, if every endpoint that it
-- may use is at its own limit or at the flow's limit. Then the request's flow queue is throttled until a request of the
-- flow ends or one of those endpoints has room. If no endpoint of the pool has room, dispatch stops anyway, so the flow
-- queue stays in order.
local function place_or_requeue(r, candidates, split, turn, picks)
  local reply, limited, closed = place_request(r, candidates, split, turn, picks)
  if reply then return reply end
  if not limited or r.deadline_ms <= now_ms then
    finish_request(r, limited and 'expired' or 'refused', limited and '' or REFUSED.NO_ENDPOINTS)
    return limited and 'expired' or 'refused ' .. REFUSED.NO_ENDPOINTS .. ' 1'
  end
  defer_write('ZREM', key.inflight, r.id)
  pool.release(r.taken)
  endpoints.count_flow(r, nil, -1)
  workloads.sent_back(r.workload)
  r.state, r.taken, r.any_endpoint = STATE_QUEUED, 0, candidates == endpoints.ANY and split == ''
  queue.insert(r)
  local flow_queue = queue.flow_queue(r)
  local tag = queue.correct(r, flow_queue, -queue.share(r), r.tag)
  queue.charge_band(r, -r.cost)
  record.put(r)
  log_event('requeued', r, tag)
  if settings.tenants then
    quotas.start(r, -1)
    queue.end_waits() -- now, so that the refund does not unthrottle the flow queue throttled below
  end
  closed = closed or {}
  if #closed == 0 or throttle.is_prefill(closed[1]) or endpoints.free_slots() > RESIDUE then
    local tag_now = queue.is_in_order(r.band, flow_queue)
    if tag_now then
      tag = tonumber(tag_now)
      queue.throttle(r.band, flow_queue, tag)
    end
    throttle.wait_for(r.band, flow_queue, tag, closed, queue.head(r.band, flow_queue) == r.id)
  end
  return 'queued ' .. (r.deadline_ms - now_ms)
end

local function place_granted(r, candidates, split, turn, picks)
  notifications.withdraw(r.owner, r.id)
  local blocker = throttle.decide(r)
  local reply = place_or_requeue(r, candidates, split, turn, picks)
  if blocker then queue.decided(r, blocker) end
  return reply
end

-- Run at most `limit` due timers, the earliest first: a queued request becomes overdue, then expires; an orphaned
-- request is abandoned. Return the number of timers that ran, and the number of requests that ended.
local TIMERS_LIMIT = 24
local timers_ran -- whether the function run_timers has run in this script call
local function run_timers(limit)
  timers_ran = true
  if not timers.due() then return 0, 0 end
  local ran, expired = 0, 0
  for _ = 1, STRAYS do
    local due = read('ZRANGEBYSCORE', key.timers, '-inf', now_ms, 'WITHSCORES', 'LIMIT', 0, limit)
    local ids, found = {}, #due / 2
    for i = 1, found do ids[i] = due[2 * i - 1] end
    record.prefetch(ids, found)
    for i, id in ipairs(ids) do
      local r = record.read(id)
      if not (r and record.is_waiting(r)) then
        drop_stray('ZREM', key.timers, id)
      else
        ran = ran + 1
        if r.state == STATE_ORPHANED then
          finish_request(r, 'abandoned')
          expired = expired + 1
        elseif r.deadline_ms <= now_ms then
          end_and_notify(r, NOTIFY_EXPIRED)
          expired = expired + 1
        else
          defer_write('ZADD', key.overdue, due[2 * i] * 1000 + r.arrived % 1000, id) -- in us: arrival orders equal ms
          timers.set(id, r.deadline_ms)
          pool.overdue = pool.overdue + 1
        end
      end
    end
    if ran > 0 or found < limit then break end
  end
  return ran, expired
end

local GUARD_CREDIT = 1 - 1e-9 -- credit for one guard dispatch; not 1, since ten times 0.1 sums to slightly less

-- Grant request r: remove r from the queue, add `take` to the stock, notify the owner. Also place r if any endpoint
-- will do, so that the owner need not ask for a placement. `turn_of`: the flow queue whose turn it is; nil if the
-- starvation guard chose r. `picks`: how many requests this call may still place. `blocker` (throttle.lua): the
-- endpoint whose room r is to take, if any.
local function grant(r, tag, take, turn_of, picks, blocker)
  local id, share = r.id, queue.serve(r, tag, turn_of)
  r.state, r.taken, r.tag = STATE_GRANTED, take, tag
  defer_write('ZADD', key.inflight, now_ms + settings.lease_ms, id)
  local counters, guard_share = pool, settings.guard_share
  local credit = counters.credit
  if not turn_of then
    counters.guards = counters.guards + 1
    credit = credit - 1
  end

  -- Cap the guard's credit at 1 + guard_share, so that at most one guard dispatch is saved up.
  counters.credit = credit < 1 and credit + guard_share or 1 + guard_share
  counters.stock, counters.dispatches = counters.stock + take, counters.dispatches + 1
  if r.limit > 0 then endpoints.count_flow(r, nil, 1) end
  workloads.dispatched(r, (now_us - r.arrived) / 1000)
  if settings.log_max > 0 then log_event('granted', r, tag, turn_of and 'turn' or 'guard', share) end
  if settings.tenants then quotas.start(r, 1) end
  local reply = r.any_endpoint and place_request(r, endpoints.ANY, '', now_us + counters.dispatches, picks)
  if reply then
    notifications.add_placed(r, reply)
  else
    if blocker then throttle.grant(r, blocker) end
    record.put(r)
    notifications.add(r.owner, id, NOTIFY_GRANTED)
  end
end

-- Return whether a tenant's limit does not suffice for request r. If so, throttle the limit's node, or end r if r must
-- not wait.
local function is_short_of_balance(r)
  local member, wait_ms, is_over_burst = quotas.lacking(r)
  if is_over_burst then
    end_and_notify(r, NOTIFY_EVICTED, true)
  elseif member then
    queue.wait_for_balance(r, member, wait_ms)
  end
  return member
end

-- Grant queued requests while the stock is below the lower bound; never exceed the upper bound (G1). End a request past
-- its TTL (G5). Orphan a request whose replica is silent, so that another replica can adopt it (G7).
local DISPATCH_LIMIT = 24 -- most requests per call; every call ends with a dispatch, so the next call continues
local function dispatch()
  local served, attempts = 0, 0
  if not timers_ran then run_timers(TIMERS_LIMIT) end
  if settings.tenants then queue.end_waits() end
  if settings.paused == 1 then return 0, 0 end
  local counters, guarded = pool, settings.guard_share > 0
  local lower, upper = counters.lower, counters.upper
  if settings.queue_enabled == 0 then lower = math.huge end
  local most = DISPATCH_LIMIT -- the most requests that this call grants
  if settings.tenants then most = counters.queued > tenants.MOST_KNOWN and 8 or 16 end -- few nodes may be cached
  local room = math.min(counters.queued, math.ceil(lower - counters.stock), most)
  if room > 0 then
    -- Estimate, exact if all costs are equal: one queued request fits for each request that this call has ended.
    queue.prefetch(math.min(room, counters.ended - counters.ended_before))
  end
  local are_bound = room > 0 and endpoints.caps and not endpoints.stock_bounds_slots()
  local places = are_bound and endpoints.free_slots() or math.huge
  while counters.queued > 0 and counters.stock < lower and attempts < DISPATCH_LIMIT and served < most
    and places > RESIDUE do
    local id, tag, band, flow_queue
    if guarded and counters.overdue > 0 and counters.credit >= GUARD_CREDIT then
      id, tag = queue.most_overdue()
    end
    if not id then id, tag, band, flow_queue = queue.next_turn() end
    if not id then break end
    local r = record.read(id)
    attempts = attempts + 1
    if flow_queue and not (r and r.state == STATE_QUEUED) then
      queue.drop_stray(id, band, flow_queue)
    elseif r.deadline_ms <= now_ms then
      end_and_notify(r, NOTIFY_EXPIRED)
    elseif not pool.is_live(r.owner) then
      queue.orphan(r, now_ms + settings.lease_ms)
    elseif r.limit > 0 and endpoints.flow_at_limit(r) then
      queue.throttle(r.band, queue.flow_queue(r), tag)
    elseif not (settings.tenants and is_short_of_balance(r)) then
      local take = pool.stock_for(r.cost, pool.upper)
      if upper <= 0 or (take > 0 and counters.stock + take > upper) then break end
      local member = flow_queue or queue.current_flow_queue(r)
      local may_start, blocker = throttle.admits(r, member)
      if may_start then
        grant(r, tag, take, flow_queue, room - served, blocker)
        served, places = served + 1, places - (settings.token_caps and take or 1)
      else
        queue.throttle(r.band, member, tag)
      end
    end
  end
  return served, attempts
end

-- Commit: write all changes of this script call to Redis. A commit reads nothing, and may repeat each of its writes.
local function commit()
  record.commit()
  workloads.commit()
  pool.commit()
  endpoints.commit()
  if prefill.in_use then prefill.commit() end
  if settings.tenants then
    tenants.commit()
    quotas.commit()
  end
  commit_writes()
  commit_log()
  notifications.publish()
end

local committing = false
-- Repeat a commit in which a write failed. Skip a Redis command that fails twice, and raise its error at the end.
local function commit_again()
  local server, failed = redis, nil
  redis = {call = function(...)
    local done, reply = pcall(server.call, ...)
    if not done then done, reply = pcall(server.call, ...) end
    if not done then failed = reply end
    return reply
  end}
  local done, why = pcall(commit)
  redis = server
  if failed then error(failed, 0) elseif not done then error(why, 0) end
end

local epoch, epoch_text -- epoch of the pool in the last call
-- End a call that may change the queue: dispatch, then commit. Return its reply: the pool's epoch, notifications for
-- the caller, dispatch attempts, how many of the attempts granted a request, then `replies`.
local function finish_call(replies)
  local served, attempts = 0, 0
  if pool.known then served, attempts = dispatch() end
  if strays > 0 then notifications.for_caller[#notifications.for_caller + 1] = 'strays ' .. strays end
  pool.touched = pool.touched or endpoints.have_changed() or prefill.in_use and prefill.have_changed()
  committing = true
  if not pcall(commit) then commit_again() end
  if epoch ~= pool.epoch then epoch, epoch_text = pool.epoch, exact(pool.epoch) end
  return {epoch_text, notifications.for_caller, attempts, served, unpack(replies or {})}
end

-- Answer a batch of items, each `size` arguments (at most six) after the caller's name, by calling
-- `answer(index, fields...)`. The function `answer` always gets six fields; the fields beyond `size` belong to the
-- next item.
local function for_each_item(args, size, answer)
  reset_notifications(args[1])
  local replies, count = {}, 0
  for at = 2, #args, size do
    count = count + 1
    replies[count] = answer(at, args[at], args[at + 1], args[at + 2], args[at + 3], args[at + 4], args[at + 5])
  end
  return finish_call(replies)
end

-- Return the n-th argument of each item, without empty arguments, and the number of arguments returned. The next call
-- reuses the table.
local column_found = {}
local function column(args, size, n)
  local found, count = column_found, 0
  for at = 1 + n, #args, size do
    local name = args[at]
    if name ~= '' then
      count = count + 1
      found[count] = name
    end
  end
  return found, count
end

-- Reset the tables that hold data of one script call. Also reset the caches between calls if they are out of date.
local function reset_caches()
  if queue.has_lengths then queue.reset() end
  if usage.has_learned then usage.reset() end
  endpoints.caps, prefill.caps = settings.caps, settings.prefill_caps
  endpoints.reset()
  if prefill.in_use then prefill.reset() end
  endpoints.outliers = {}
  if pool.outliers > 0 then marks.read_outliers() end
  reset_workloads()
  if throttle.used or not cache_is_valid then throttle.used = nil end
  if settings.tenants then
    tenants.reset()
    quotas.reset()
  end
  if not cache_is_valid then
    timers.forget()
    order.forget()
  end
end

local run
do -- a block of its own: Lua allows 200 local variables in a chunk
  local in_progress = false -- true during a script call, and still true afterwards if the call failed
  local function begin(pool_key)
    local failed = in_progress
    in_progress, committing, strays = true, false, 0
    use_keys(pool_key)
    reset_storage()
    reset_records()
    reset_log()
    timers_ran = false
    pool.read(failed)
    reset_caches()
  end

  local function perform(act, keys, args)
    begin(keys[1])
    local reply = act(args)
    in_progress = false
    return reply
  end

  -- Raise `why` as a Redis error whose first word is a code; add ERR if it has none.
  local function fail(why)
    local text = type(why) == 'table' and why.err or tostring(why)
    error({err = string.find(text, '^%u+ ') and text or 'ERR ' .. text}, 0)
  end

  -- Entry point of every library function. If a call fails, undo its writes unless the commit has begun; raise its
  -- error.
  function run(act, keys, args)
    use_builtins()
    local done, reply = pcall(perform, act, keys, args)
    if done then return reply end
    if not committing then undo_writes() end
    fail(reply)
  end
end
