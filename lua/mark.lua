-- include: dispatch
-- Say of endpoints that they are drained or down, or no longer; what now fits is dispatched.
--
-- Guarantees: nothing new goes to a marked endpoint from here on, whoever picks; what runs there ends there.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then for each endpoint: address, what (drained | down), on (1 or 0)
-- Returns {born, news, attempts, served, reply...}: 'marked' | 'unknown' (no such endpoint is published)
local MARK_ITEM = 3
local function mark(args)
  return batch(args, MARK_ITEM, function(_, address, what, on)
    return endpoints.mark(what, on == '1', address) and 'marked' or 'unknown'
  end)
end
