-- include: dispatch
-- Mark endpoints as drained or down, or remove the mark; what now fits is dispatched.
--
-- Guarantees: nothing new goes to a marked endpoint from now on, whichever replica chooses; what runs there ends there.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then for each endpoint: address, mark (drained | down), on (1 or 0)
--
-- Returns {epoch, notifications, attempts, served, reply...}: 'marked' | 'unknown' (no such endpoint is published)

local function mark_endpoint(args)
  return for_each_item(args, MARK_ENDPOINT_ITEM, function(_, address, what, on)
    return endpoints.mark(what, on == '1', address) and 'marked' or 'unknown'
  end)
end
