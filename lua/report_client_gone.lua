-- include: dispatch
-- Record requests whose client has gone according to an access-log entry without an accounting token. An entry without
-- a token proves nothing, but is the only report of a client that leaves before Envoy has read the picker's answer. The
-- sweep then compares the endpoint's next metrics page with the pool's count of its requests (sweep.lua).
--
-- Guarantees: the script changes only the list of suspects that the sweep reads.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then the ids of requests
--
-- Returns {epoch, notifications, attempts, served, reply...}: 'suspected' | 'waiting' (not placed yet: report it again,
--   since the owner may not know that the client has gone) | 'unknown'

local function report_client_gone(args)
  return for_each_item(args, ITEM.report_client_gone, function(_, id)
    local r = record.read(id)
    if not r then return 'unknown' end
    if r.state ~= STATE_PLACED then return 'waiting' end
    defer_write('ZADD', key.suspects, now_ms, id)
    return 'suspected'
  end)
end
