-- include: dispatch tombstones
-- Remember ends, in tombstones: a replica that was without the shared state, and has not heard of them, would bring
-- such requests back (renew), as stock that nobody uses.
--
-- Guarantees: a request is not restored that was last seen alive before the end that is told here; what is known of
-- its id, and its own next admission, stay as they are.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then for each end: id, how long ago it was heard, ms
-- Returns {born, news, attempts, served, reply...}: 'buried' | 'back' (buried, and it counts: it has been restored)
local BURY_ITEM = 2
local function bury(args)
  record.prefetch(column(args, BURY_ITEM, 1))
  return batch(args, BURY_ITEM, function(_, id, ago_ms)
    tombstones.put(id, now_ms - tonumber(ago_ms))
    local r = record.read(id)
    return r and record.is_restored(r) and 'back' or 'buried'
  end)
end
