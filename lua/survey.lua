-- include: pool
-- All lanes, as one replica has read them for all: what it has left, or who is to read them now.
--
-- Guarantees: while one reads, no other is told to, for as long as the claim is good.
--
-- keys[1] epp:{POOL}:pool
-- args[1] how long a claim is good, ms
-- Returns {text, ms}: what was left, and how long it is to be taken still; {'', ms}: another reads them, and has so
--   long; {'', 0}: the caller reads them, and leaves them in `lanes`
local function survey(args)
  if redis.call('SET', key.lanes, '', 'NX', 'PX', args[1]) then return {'', 0} end
  return {redis.call('GET', key.lanes), redis.call('PTTL', key.lanes)}
end
