-- The keys of a pool, and how a call reads and writes them. (Other files cache counters, records, workloads and loads.)
-- Uses Redis's functions. Defines `key`, `read`, `flush`, `defer_write`, `drop_stray` and the other names below.
--
-- The function `defer_write` buffers a write until the end of the script call. At the end, one command writes all
-- values of a key, so a call that fails earlier has written nothing. The function `read` first writes the buffered
-- changes of its key, so a script call sees its own writes. If a call fails, `undo_writes` restores the former values
-- of flushed keys.

-- Copy global functions to locals: in a Redis library a lookup of a global takes three steps. While Redis loads the
-- library, only the global `redis` exists, so the first call copies the other functions.
local function builtins()
  return redis, struct, string, table, math, ipairs, pairs, tonumber, unpack, pcall, next
end
local redis, struct, string, table, math, ipairs, pairs, tonumber, unpack, pcall, next = redis
local function use_builtins()
  if math then return end
  redis, struct, string, table, math, ipairs, pairs, tonumber, unpack, pcall, next = builtins()
end

-- Every key of the pool is derived from the declared key, keys[1] = epp:{POOL}:pool. All keys carry the hash tag
-- {POOL}, so a Cluster keeps them in one slot. docs/redis-schema.md lists the keys. Byte 31 joins two names in a key or
-- field; no name can contain it (picker_fleet/domain/units.py), so two pairs of names never make the same key.
local key -- the keys of the pool that this call serves
local use_keys, joined
local read, flush, defer_write, deferred_entry, defer_unlink
local write_values, note_original, undo_writes, commit_writes, reset_storage
local read_ahead = {} -- functions that read the first members of sorted sets ahead; lib/fronts.lua fills the table
local fronts = {} -- key of a sorted set -> its front: the set's first members, read ahead
do -- a block of its own: Lua allows 200 local variables in a chunk
  local pools = {} -- declared key -> the keys of its pool
  -- Return a table that maps an ending to `prefix` .. ending and caches MOST_NAMES names: a concatenation costs as much
  -- as 20 lookups.
  local MOST_NAMES = 256
  local function names_with_prefix(prefix)
    local kept = 0
    return setmetatable({}, {__index = function(names, ending)
      if kept == MOST_NAMES then
        kept = 0
        for each in pairs(names) do names[each] = nil end
      end
      kept = kept + 1
      names[ending] = prefix .. ending
      return names[ending]
    end})
  end

  -- Return a table that maps a band to `make`(band), called at the band's first use.
  local function by_band(make)
    return setmetatable({}, {__index = function(made, band)
      made[band] = make(band)
      return made[band]
    end})
  end

  function joined(name, other) return name .. '\31' .. other end
  function use_keys(pool_key)
    key = pools[pool_key]
    if key then return end
    local base = string.sub(pool_key, 1, -5)
    key = {pool = pool_key}
    for _, name in ipairs({'requests', 'inflight', 'timers', 'overdue', 'limits', 'load', 'prefill_load', 'prefills',
      'endpoints', 'marks', 'metrics', 'workloads', 'flow_workloads', 'answers', 'prompts', 'replicas', 'replica_info',
      'tombstones', 'unheard', 'suspects', 'ghosts', 'log', 'blockers', 'pending', 'orphan_cursors', 'outliers',
      'queue_snapshot', 'origins', 'origin_times', 'tenants', 'tenant_changes', 'balances', 'budget_waits',
      'usage_hours'}) do
      key[name] = base .. name
    end
    for _, kind in ipairs({'flows', 'throttled', 'finish', 'candidates', 'preempted', 'nodes'}) do
      key[kind] = by_band(function(band) return base .. kind .. ':' .. band end)
    end
    for _, kind in ipairs({'queue', 'growing', 'static', 'blocked', 'children', 'finished'}) do
      key[kind] = by_band(function(band) return names_with_prefix(base .. kind .. ':' .. band .. ':') end)
    end

    function key.line(band, flow_queue, workload)
      return base .. 'line:' .. band .. ':' .. joined(flow_queue, workload)
    end

    key.inbox = names_with_prefix(base .. 'inbox:')
    function key.usage(hour) return base .. 'usage:' .. hour end
    function key.wake(replica) return base .. 'wake:' .. replica end
    pools[pool_key] = key
  end

  -- Write-behind: buffer the call's writes until its end.
  local AT_MOST = 2000 -- most values for one unpack(), which puts them on a stack of limited depth
  local deferred = {} -- key -> its newest deferred command, with n arguments
  local commands, used = {}, 0 -- deferred commands in order; later calls reuse the tables
  local unlinked = {} -- the Redis keys that the call removes at its end
  -- The values before this call, for undo_writes: key -> member -> score, and key -> field -> value; false: no value
  local former_scores, former_values = {}, {}

  -- Write the first `n` of `values` to key `name`, in commands of at most AT_MOST values.
  function write_values(command, name, values, n)
    if n == 0 then return end
    if n <= AT_MOST then return redis.call(command, name, unpack(values, 1, n)) end
    for first = 1, n, AT_MOST do
      redis.call(command, name, unpack(values, first, math.min(first + AT_MOST - 1, n)))
    end
  end

  local function formers_of(name, is_hash)
    local all = is_hash and former_values or former_scores
    local former = all[name]
    if not former then
      former = {}
      all[name] = former
    end
    return former
  end

  -- Remember a member's score (nil: none) before the call changes the score, so that `flush` need not read the score.
  function note_original(name, member, score)
    local former = formers_of(name)
    if former[member] == nil then former[member] = score or false end
  end

  local FIRST_MEMBER = {ZADD = 2, ZREM = 1, HSET = 1, HDEL = 1} -- index of the command's first member or field
  local EACH = {ZADD = 2, ZREM = 1, HSET = 2, HDEL = 1} -- number of the command's arguments for each member or field
  local READ = {ZADD = 'ZMSCORE', ZREM = 'ZMSCORE', HSET = 'HMGET', HDEL = 'HMGET'}
  local function note_originals(entry)
    local command, asked, count = entry.command, {}, 0
    local former = formers_of(entry.key, READ[command] == 'HMGET')
    for i = FIRST_MEMBER[command], entry.n, EACH[command] do
      if former[entry[i]] == nil then
        count = count + 1
        asked[count] = entry[i]
      end
    end
    for first = 1, count, AT_MOST do
      local last = math.min(first + AT_MOST - 1, count)
      local found = redis.call(READ[command], entry.key, unpack(asked, first, last))
      for i = first, last do former[asked[i]] = found[i - first + 1] end
    end
  end

  local function flush_entry(entry)
    if entry.former then flush_entry(entry.former) end
    if entry.n > 0 then
      note_originals(entry)
      write_values(entry.command, entry.key, entry, entry.n)
      entry.n = 0
    end
  end

  local function new_entry(command, name)
    used = used + 1
    local entry = commands[used] or {}
    entry.former = deferred[name]
    commands[used], deferred[name] = entry, entry
    entry.command, entry.key, entry.n = command, name, 0
    return entry
  end

  -- At the end of the call write by ZADD (score, member), ZREM (member), HSET (field, value) or HDEL (field). Writes to
  -- the same key keep their order.
  function defer_write(command, name, a, b)
    local entry = deferred[name]
    if not entry or entry.command ~= command then entry = new_entry(command, name) end
    local n = entry.n + 1
    entry[n] = a
    if b then
      n = n + 1
      entry[n] = b
    end
    entry.n = n
  end

  -- Return the deferred command of a key, to which a caller with many writes appends arguments, and raises `n`.
  function deferred_entry(command, name)
    local entry = deferred[name]
    return entry and entry.command == command and entry or new_entry(command, name)
  end

  function defer_unlink(name) unlinked[#unlinked + 1] = name end

  -- Restore the members and fields that a failed call has written. Skip a member or field that Redis cannot restore.
  function undo_writes()
    for name, former in pairs(former_scores) do
      for member, score in pairs(former) do
        if score then pcall(redis.call, 'ZADD', name, score, member) else pcall(redis.call, 'ZREM', name, member) end
      end
    end
    for name, former in pairs(former_values) do
      for field, value in pairs(former) do
        if value then pcall(redis.call, 'HSET', name, field, value) else pcall(redis.call, 'HDEL', name, field) end
      end
    end
  end

  -- Write all buffered changes to Redis. If a commit fails, the next commit continues after the last successful write.
  function commit_writes()
    for name in pairs(fronts) do read_ahead.discard(name, true) end
    for i = 1, used do
      local entry = commands[i]
      write_values(entry.command, entry.key, entry, entry.n)
      entry.n = 0
    end
    for i = #unlinked, 1, -1 do
      redis.call('UNLINK', unlinked[i])
      unlinked[i] = nil
    end
  end

  -- Flush the deferred writes and the read-ahead changes of a key.
  function flush(name)
    if fronts[name] then read_ahead.discard(name) end
    local entry = deferred[name]
    if entry then
      flush_entry(entry)
      deferred[name] = nil
    end
  end

  -- Read key `name`, after flushing this call's writes to the key.
  function read(command, name, ...)
    if fronts[name] or deferred[name] then flush(name) end
    return redis.call(command, name, ...)
  end

  function reset_storage()
    for i = 1, used do deferred[commands[i].key] = nil end
    if used > 100 then commands, deferred = {}, {} end
    used = 0
    if unlinked[1] then unlinked = {} end
    if next(former_scores) then former_scores = {} end
    if next(former_values) then former_values = {} end
    if next(fronts) then fronts = {} end
  end
end

-- A stray is a member whose request or flow queue is missing. A function that finds a stray drops it and goes on.
local strays = 0
local STRAYS = 16 -- most strays that a call drops in one set before it gives up on the set
local function drop_stray(command, name, member)
  strays = strays + 1
  read_ahead.discard(name)
  defer_write(command, name, member)
end
