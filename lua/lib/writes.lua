-- include: keys
-- Writes put off to the end of a call, where one command carries what a batch has to say of a key. The
-- last word on a member wins. Only for what no later step of the same call reads back from Redis.
local writes = {zsets = {}, hashes = {}}
local function note(kind, name, member, value)
  local changes = kind[name]
  if not changes then
    changes = {}
    kind[name] = changes
  end
  changes[member] = value
end
-- `score` or `value` false takes the member away.
function writes.zset(name, member, score) note(writes.zsets, name, member, score) end
function writes.hash(name, field, value) note(writes.hashes, name, field, value) end
function writes.pending(name, member)
  local changes = writes.zsets[name]
  return changes ~= nil and changes[member] ~= nil
end
local function flush(kind, set, remove, score_first)
  for name, changes in pairs(kind) do
    local put, gone = {}, {}
    for member, value in pairs(changes) do
      if value == false then
        gone[#gone + 1] = member
      elseif score_first then
        put[#put + 1] = value
        put[#put + 1] = member
      else
        put[#put + 1] = member
        put[#put + 1] = value
      end
    end
    -- unpack() puts its values on a stack of limited depth
    for at = 1, #put, 2000 do redis.call(set, name, unpack(put, at, math.min(at + 1999, #put))) end
    for at = 1, #gone, 2000 do redis.call(remove, name, unpack(gone, at, math.min(at + 1999, #gone))) end
  end
end
function writes.flush()
  flush(writes.zsets, 'ZADD', 'ZREM', true)
  flush(writes.hashes, 'HSET', 'HDEL', false)
end
local function forget_writes() writes.zsets, writes.hashes = {}, {} end
