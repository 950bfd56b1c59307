-- include: storage
-- The flow queues as one replica has read them for all; or the right to read them.
--
-- Guarantees: while one replica reads, no other is asked to, for as long as its claim is valid.
--
-- keys[1] epp:{POOL}:pool
-- args[1] how long a claim is valid, ms
--
-- Returns {text, ms}: the snapshot, and how long it is still valid; {'', ms}: another replica reads, and has that long
--   left; {'', 0}: the caller reads, and stores the snapshot

local function claim_queue_snapshot(args)
  if redis.call('SET', key.queue_snapshot, '', 'NX', 'PX', args[1]) then return {'', 0} end
  return {read('GET', key.queue_snapshot), read('PTTL', key.queue_snapshot)}
end
