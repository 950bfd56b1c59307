-- include: dispatch
-- Remember ends that were heard while the shared state was away. Another replica that let such a request go, and
-- has not heard of its end, would bring it back (renew) just then: stock that nobody uses.
--
-- Guarantees: a buried id is not restored; what is known of it, and its own next admission, stay as they are.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then the ids of requests that have ended
-- Returns {born, news, attempts, served, reply...}: 'buried'
local BURIED_MS = 10000 -- longer than replicas take to come back (app/admission/homecoming.py)
local function bury(args)
  return batch(args, 1, function(_, id)
    later('ZADD', key.buried, now_ms + BURIED_MS, id)
    return 'buried'
  end)
end
