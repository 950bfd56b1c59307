-- include: dispatch
-- An operator takes a request out of the queue. Its client is answered by the replica that holds it.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica   args[2] request id
-- Returns {born, news, attempts, served, reply}: 'evicted' | 'running' (too late) | 'unknown'
local function evict(args)
  return batch(args, 1, function(_, id)
    local r = record.read(id)
    if not r then return 'unknown' end
    if r.state ~= 'queued' and r.state ~= 'held' then return 'running' end
    turn_away(r, 'evicted')
    return 'evicted'
  end)
end
