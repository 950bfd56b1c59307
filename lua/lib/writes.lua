-- include: keys
-- Writes put off, so that one command carries what a batch has to say of a key: `later` instead of
-- `redis.call`, for commands that take any number of `a` or `a, b`. Those of one key keep their order. Whoever
-- reads such a key in the same call sends what waits for it first.
local AT_MOST = 2000 -- unpack() puts its values on a stack of limited depth
local waiting, keys_waiting = {}, 0 -- key -> command and arguments, n of them; tables are used again
local function send(name)
  local put_off = waiting[name]
  if not put_off or put_off.n == 0 then return end
  redis.call(put_off.command, name, unpack(put_off, 1, put_off.n))
  put_off.n = 0
end
local function later(command, name, a, b)
  local put_off = waiting[name]
  if not put_off then
    put_off = {command = command, n = 0}
    waiting[name] = put_off
    keys_waiting = keys_waiting + 1
  elseif put_off.command ~= command or put_off.n >= AT_MOST then
    send(name)
    put_off.command = command
  end
  local n = put_off.n + 1
  put_off[n] = a
  if b then
    n = n + 1
    put_off[n] = b
  end
  put_off.n = n
end
local function send_all()
  for name in pairs(waiting) do send(name) end
end
local function forget_writes()
  if keys_waiting > 100 then waiting, keys_waiting = {}, 0 end
  for _, put_off in pairs(waiting) do put_off.n = 0 end -- of a call that failed
end
