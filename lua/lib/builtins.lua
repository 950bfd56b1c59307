-- What a life uses of Lua and Redis, as locals: among the globals, which Redis guards, one is found in three
-- steps. A library that is being loaded has none of them but `redis`, so the first call brings them.
local function builtins()
  return redis, struct, string, table, math, ipairs, pairs, tonumber, unpack, pcall, next
end
local redis, struct, string, table, math, ipairs, pairs, tonumber, unpack, pcall, next = redis
local function use_builtins()
  if math then return end
  redis, struct, string, table, math, ipairs, pairs, tonumber, unpack, pcall, next = builtins()
end
