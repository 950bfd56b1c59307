-- include: keys
-- Writes, in two kinds. Most are put off to the end of the call (`later`), so that one command carries what a batch
-- has to say of a key, and a call that fails before leaves nothing of them. Those of one key keep their order. What
-- must be in Redis before the end, since the call reads it again there, is written by `send` or `write_now`, which
-- remember what was there before: if the call then fails, `undo` brings it back.
local write_all, remember, remember_all, send, later, unlink_later, write_now, undo, send_all, forget_writes
local AT_MOST = 2000 -- unpack() puts its values on a stack of limited depth
local waiting = {} -- key -> its last command that is put off, with its arguments, n of them
local call_number = 0
local originals = {} -- key -> member or field -> its score or value before this call, false if there was none
do -- a chunk may have 200 locals
  local tables, used = {}, 0 -- of this call and former ones, in order: to fill one again costs less than to make it
  local unlinked = {} -- keys that go at the end
  -- One command with the first `n` of `values`, or as many as it takes.
  function write_all(command, name, values, n)
    if n == 0 then return end
    if n <= AT_MOST then return redis.call(command, name, unpack(values, 1, n)) end
    for first = 1, n, AT_MOST do
      redis.call(command, name, unpack(values, first, math.min(first + AT_MOST - 1, n)))
    end
  end
  local present, is_hash = {}, {} -- key -> what is there now, of the same; whether it is a hash
  local function known_of(name, command)
    local former = originals[name]
    if not former then
      former = {}
      originals[name], present[name], is_hash[name] = former, {}, command == 'HSET' or command == 'HDEL'
    end
    return former, present[name]
  end
  -- The score of a member, as the call has read it: before it changes that it need not be read again.
  function remember(name, member, value)
    local former, current = known_of(name)
    if former[member] == nil then former[member], current[member] = value or false, value or false end
  end
  local FIRST_MEMBER = {ZADD = 2, ZREM = 1, HSET = 1, HDEL = 1} -- among the arguments
  local EACH = {ZADD = 2, ZREM = 1, HSET = 2, HDEL = 1} -- how many arguments a member has
  local READ = {ZADD = 'ZMSCORE', ZREM = 'ZMSCORE', HSET = 'HMGET', HDEL = 'HMGET'}
  function remember_all(command, name, values, n)
    local former, current = known_of(name, command)
    local asked, count = {}, 0
    for i = FIRST_MEMBER[command], n, EACH[command] do
      if former[values[i]] == nil then
        count = count + 1
        asked[count] = values[i]
      end
    end
    for first = 1, count, AT_MOST do
      local last = math.min(first + AT_MOST - 1, count)
      local found = redis.call(READ[command], name, unpack(asked, first, last))
      for i = first, last do
        former[asked[i]] = found[i - first + 1]
        current[asked[i]] = found[i - first + 1]
      end
    end
    for i = FIRST_MEMBER[command], n, EACH[command] do
      current[values[i]] = command == 'ZADD' and values[i - 1] or command == 'HSET' and values[i + 1]
    end
  end
  local function send_one(put_off)
    if put_off.former then send_one(put_off.former) end
    if put_off.n > 0 then
      remember_all(put_off.command, put_off.key, put_off, put_off.n)
      write_all(put_off.command, put_off.key, put_off, put_off.n)
      put_off.n = 0
    end
  end
  function send(name)
    local put_off = waiting[name]
    if put_off then
      send_one(put_off)
      waiting[name] = nil
    end
  end
  local function turn_to(command, name)
    used = used + 1
    local put_off = tables[used] or {}
    put_off.former = waiting[name]
    tables[used], waiting[name] = put_off, put_off
    put_off.command, put_off.key, put_off.n = command, name, 0
    return put_off
  end
  -- For commands that take any number of `a` or `a, b`. Whoever reads such a key in the same call sends it first.
  function later(command, name, a, b)
    local put_off = waiting[name]
    if not put_off or put_off.command ~= command then put_off = turn_to(command, name) end
    local n = put_off.n + 1
    put_off[n] = a
    if b then
      n = n + 1
      put_off[n] = b
    end
    put_off.n = n
  end
  function unlink_later(name) unlinked[#unlinked + 1] = name end
  -- One member or field of a key, now. Returns whether that has changed anything, for ZREM and HDEL.
  local pair = {} -- filled again by each call
  function write_now(command, name, a, b)
    send(name)
    pair[1], pair[2] = a, b
    local member = command == 'ZADD' and b or a
    local current = present[name]
    local was = current and current[member]
    remember_all(command, name, pair, b and 2 or 1)
    if was == nil then was = originals[name][member] end
    if not b and not was then return false end
    if b then redis.call(command, name, a, b) else redis.call(command, name, a) end
    return true
  end
  -- A call has failed before its end. What can't be brought back is passed over.
  function undo()
    for name, former in pairs(originals) do
      for member, value in pairs(former) do
        if is_hash[name] then
          if value then pcall(redis.call, 'HSET', name, member, value) else pcall(redis.call, 'HDEL', name, member) end
        elseif value then
          pcall(redis.call, 'ZADD', name, value, member)
        else
          pcall(redis.call, 'ZREM', name, member)
        end
      end
    end
  end
  function send_all()
    for i = 1, used do
      local put_off = tables[i]
      write_all(put_off.command, put_off.key, put_off, put_off.n)
      put_off.n = 0
    end
    for i = #unlinked, 1, -1 do
      redis.call('UNLINK', unlinked[i])
      unlinked[i] = nil
    end
  end
  -- Tables that a call has left empty serve the next one: to make one costs as much as a tenth of a command.
  function forget_writes()
    call_number = call_number + 1
    for i = 1, used do waiting[tables[i].key] = nil end
    if used > 100 then tables, waiting = {}, {} end
    used = 0
    if unlinked[1] then unlinked = {} end
    if next(originals) then originals, present, is_hash = {}, {}, {} end
  end
end
-- Ids and lanes that stand in a set without what they stand for: dropped by whoever comes upon them.
local strays = 0
local STRAYS = 16 -- dropped at one place before the call goes on without it
local function drop_stray(command, name, member)
  strays = strays + 1
  write_now(command, name, member)
end
