-- include: keys
-- Writes put off, so that one command carries what a batch has to say of a key: `later` instead of
-- `redis.call`, for commands that take any number of `a` or `a, b`. Those of one key keep their order. Whoever
-- reads such a key in the same call sends what waits for it first.
local AT_MOST = 2000 -- unpack() puts its values on a stack of limited depth
local waiting = {} -- key -> command and arguments, n of them
local tables, used = {}, 0 -- of this call and former ones: to fill one again costs less than to make it
-- One command with the first `n` of `values`, or as many as it takes.
local function write_all(command, name, values, n)
  if n == 0 then return end
  if n <= AT_MOST then return redis.call(command, name, unpack(values, 1, n)) end
  for first = 1, n, AT_MOST do
    redis.call(command, name, unpack(values, first, math.min(first + AT_MOST - 1, n)))
  end
end
local function give(put_off)
  local n = put_off.n
  put_off.n = 0
  write_all(put_off.command, put_off.key, put_off, n)
end
local function send(name)
  local put_off = waiting[name]
  if put_off then give(put_off) end
end
local function turn_to(command, name)
  local put_off = waiting[name]
  if put_off then
    give(put_off)
  else
    used = used + 1
    put_off = tables[used] or {}
    tables[used], waiting[name] = put_off, put_off
  end
  put_off.command, put_off.key, put_off.n = command, name, 0
  return put_off
end
local function later(command, name, a, b)
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
local function send_all()
  for i = 1, used do give(tables[i]) end
end
local function forget_writes()
  if used > 100 then tables = {} end
  waiting, used = {}, 0
end
