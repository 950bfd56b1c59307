-- include: dispatch
-- Note requests whose client has gone by an access-log entry without a ticket. Such an entry proves nothing, but it
-- is all that is told of a client that leaves before Envoy has read the picker's answer: the sweep looks for the
-- request on its endpoint's next pages (sweep.lua).
--
-- Guarantees: nothing but the sweep's attention changes.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then the ids of requests
-- Returns {born, news, attempts, served, reply...}: 'suspected' | 'unknown' (not placed)
local function suspect(args)
  return batch(args, 1, function(_, id)
    local r = record.read(id)
    if not r or r.state ~= 'placed' then return 'unknown' end
    later('ZADD', key.suspects, now_ms, id)
    return 'suspected'
  end)
end
