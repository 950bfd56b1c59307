-- include: ending
-- What time brings due, the earliest first: a queued request becomes overdue, then expires; a held one is
-- given up.
local TIMERS_LIMIT = 24
local timed -- once a call is enough
local function run_timers(limit)
  timed = true
  if not timers.due() then return 0, 0 end
  local ran, expired = 0, 0
  for _ = 1, STRAYS do
    local due = redis.call('ZRANGEBYSCORE', key.timers, '-inf', now_ms, 'WITHSCORES', 'LIMIT', 0, limit)
    local ids, found = {}, #due / 2
    for i = 1, found do ids[i] = due[2 * i - 1] end
    record.prefetch(ids, found)
    for i, id in ipairs(ids) do
      local r = record.read(id)
      if not r or (r.state ~= 'queued' and r.state ~= 'held') then
        drop_stray('ZREM', key.timers, id)
      else
        ran = ran + 1
        if r.state == 'held' then
          finish_request(r, 'abandoned')
          expired = expired + 1
        elseif r.deadline_ms <= now_ms then
          turn_away(r, 'expired')
          expired = expired + 1
        else
          later('ZADD', key.overdue, due[2 * i] * 1000 + r.arrived % 1000, id) -- of one ms, as they arrived
          timers.set(id, r.deadline_ms)
          pool.overdue = pool.overdue + 1
        end
      end
    end
    if ran > 0 or found < limit then break end
  end
  send(key.overdue)
  return ran, expired
end
local live = {} -- owner -> whether it has been heard of lately, as this call knows it
local function is_live(owner)
  if live[owner] == nil then
    live[owner] = tonumber(redis.call('ZSCORE', key.replicas, owner) or 0) > now_ms - settings.silence_ms
  end
  return live[owner]
end
local GUARD_CREDIT = 1 - 1e-9 -- ten tenths are not quite one
local function grant(r, tag, take, turn_of)
  local id, share = r.id, queue.serve(r, tag, turn_of)
  r.state, r.taken, r.tag = 'granted', take, tag
  record.write(r)
  later('ZADD', key.inflight, now_ms + settings.lease_ms, id)
  local counters, guard_share = pool, settings.guard_share
  local credit = counters.credit
  if not turn_of then
    counters.guards = counters.guards + 1
    credit = credit - 1
  end
  -- No more than one is saved up; what a share that does not divide 1 adds past that counts for the next.
  counters.credit = credit < 1 and credit + guard_share or 1 + guard_share
  counters.stock, counters.dispatches = counters.stock + take, counters.dispatches + 1
  if r.limit > 0 then endpoints.count_flow(r, nil, 1) end
  workloads.dispatched(r.workload, (now_us - r.arrived) / 1000)
  news.tell(r.owner, id, 'granted')
  if settings.log_max > 0 then log('granted', r, tag, turn_of and 'turn' or 'guard', share) end
end
-- Serve the queue while there is room: stock below the lower bound, and never past the upper (G1).
-- A request past its TTL is not served (G5); one whose replica is silent is held for adoption (G7).
local DISPATCH_LIMIT = 24 -- the next call goes on; every one that frees room ends with a dispatch
local function dispatch()
  if next(live) then live = {} end
  local served, attempts = 0, 0
  if not timed then run_timers(TIMERS_LIMIT) end
  if settings.paused == 1 then return 0, 0 end
  local counters, guarded = pool, settings.guard_share > 0
  local lower, upper = counters.lower, counters.upper
  if settings.queue_enabled == 0 then lower = math.huge end
  local room = math.min(counters.queued, math.ceil(lower - counters.stock), DISPATCH_LIMIT)
  if room > 0 then
    -- As many as have ended are likely to fit; who costs more or less makes it a guess.
    queue.look_ahead(math.min(room, counters.ended - counters.ended_before))
  end
  local places = room > 0 and settings.caps and endpoints.places() or math.huge
  while counters.queued > 0 and counters.stock < lower and attempts < DISPATCH_LIMIT and places > 0 do
    local id, tag, band, lane
    if guarded and counters.overdue > 0 and counters.credit >= GUARD_CREDIT then
      id, tag = queue.most_overdue()
    end
    if not id then id, tag, band, lane = queue.turn() end
    if not id then break end
    local r = known_records[id] or record.read(id)
    attempts = attempts + 1
    if lane and not (r and r.state == 'queued') then
      queue.drop_stray(id, band, lane)
    elseif r.deadline_ms <= now_ms then
      turn_away(r, 'expired')
    elseif not (live[r.owner] or is_live(r.owner)) then
      queue.hold(r, now_ms + settings.lease_ms)
    elseif r.limit > 0 and endpoints.flow_full(r) then
      queue.park(r.band, queue.lane(r), tag)
    else
      local take = pool.share(r.cost, pool.upper)
      if upper <= 0 or (take > 0 and counters.stock + take > upper) then break end
      grant(r, tag, take, lane)
      served, places = served + 1, places - 1
    end
  end
  return served, attempts
end
-- What a call has decided, written. Nothing is read from here on, and each step may be repeated.
local function commit()
  ahead.save()
  record.save()
  workloads.save()
  pool.save()
  endpoints.save()
  send_all()
  send_log()
  news.send()
end
local committing = false
-- A write has failed with others already done: the rest follows, and what fails twice is left out and told.
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
local born, born_text -- of the last call
-- Every call that may change the queue ends here. Returns what each reply begins with:
-- the pool's birth, the caller's news, dispatch attempts and successes.
local function conclude(replies)
  local served, attempts = 0, 0
  if pool.known then served, attempts = dispatch() end
  if strays > 0 then news.mine[#news.mine + 1] = 'strays ' .. strays end
  pool.touched = pool.touched or endpoints.have_changed()
  committing = true
  if not pcall(commit) then commit_again() end
  if born ~= pool.born then born, born_text = pool.born, full(pool.born) end
  return {born_text, news.mine, attempts, served, unpack(replies or {})}
end
-- The batch form of a call: `answer(index, fields...)` for each `size` arguments after the caller's name, at
-- most five. An answer to fewer does not look at the others, which are the next one's.
local function batch(args, size, answer)
  forget_news(args[1])
  local replies, count = {}, 0
  for at = 2, #args, size do
    count = count + 1
    replies[count] = answer(at, args[at], args[at + 1], args[at + 2], args[at + 3], args[at + 4])
  end
  return conclude(replies)
end
-- What a batch names in its n-th of every `size` arguments, and how many they are; '' is nobody. The table is
-- filled again by the next.
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
local under_way = false -- also after a call that failed
local function begin(pool_key)
  local failed = under_way
  under_way, committing, strays = true, false, 0
  use_keys(pool_key)
  forget_writes()
  forget_records()
  forget_lengths()
  forget_fronts()
  forget_log()
  timed = false
  pool.read(failed)
  forget_endpoints()
  timers.forget()
  forget_workloads()
end
local function perform(act, keys, args)
  begin(keys[1])
  local reply = act(args)
  under_way = false
  return reply
end
-- Redis tells what it answered with by the first word, and puts ERR before a text alone.
local function fail(why)
  local text = type(why) == 'table' and why.err or tostring(why)
  error({err = string.find(text, '^%u+ ') and text or 'ERR ' .. text}, 0)
end
-- What each function of the library does: all of it, or, where it fails before its end, nothing.
local function run(act, keys, args)
  use_builtins()
  local done, reply = pcall(perform, act, keys, args)
  if done then return reply end
  if not committing then undo() end
  fail(reply)
end
