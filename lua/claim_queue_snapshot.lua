-- include: storage
-- Get the snapshot of all flow queues that one replica reads for the fleet, or the right to read it.
--
-- Guarantees: while the claim of one replica is valid, no other gets the right to read.
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
