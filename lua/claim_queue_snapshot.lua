-- include: storage
-- One replica stores a snapshot of all flow queues for the fleet. Return the stored snapshot, or claim for the calling
-- replica the task to make a snapshot.
--
-- Guarantees: while the claim of one replica is valid, no other replica gets a claim.
--
-- keys[1] epp:{POOL}:pool
-- args[1] how long a claim is valid, ms
--
-- Returns {text, ms}: the snapshot, and how long it is still valid; {'', ms}: another replica makes the snapshot, and
--   how long its claim is still valid; {'', 0}: the caller has the claim, reads the flow queues and stores the snapshot

local function claim_queue_snapshot(args)
  if redis.call('SET', key.queue_snapshot, '', 'NX', 'PX', args[1]) then return {'', 0} end
  return {read('GET', key.queue_snapshot), read('PTTL', key.queue_snapshot)}
end
