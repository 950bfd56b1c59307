-- include: dispatch
-- End a waiting request at an operator's demand. The replica that owns the request then answers the client.
--
-- Guarantees: the script ends no granted or placed request.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica   args[2] request id
--
-- Returns {epoch, notifications, attempts, served, reply}: 'evicted' | 'running' (too late) | 'unknown'

local function evict(args)
  return for_each_item(args, 1, function(_, id)
    local r = record.read(id)
    if not r then return 'unknown' end
    if not record.is_waiting(r) then return 'running' end
    end_and_notify(r, NOTIFY_EVICTED)
    return 'evicted'
  end)
end
