-- include: dispatch
-- Store tombstones, the records of requests' ends. A replica that was without Redis may have missed the end of a
-- request: without a tombstone its renewal would restore the request, which would take stock without running.
--
-- Guarantees: a request last seen alive before its reported end is not restored. An existing record with the id does
-- not change, and the id can be admitted again.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then for each end: id, how long ago it was reported, ms
--
-- Returns {epoch, notifications, attempts, served, reply...}: 'stored' | 'back' (stored, but the request has a record,
--   since it was restored before)

local function tombstone(args)
  record.prefetch(column(args, ITEM.tombstone, 1))
  return for_each_item(args, ITEM.tombstone, function(_, id, ago_ms)
    tombstones.put(id, now_ms - tonumber(ago_ms))
    local r = record.read(id)
    return r and r.deadline_ms == record.NO_DEADLINE and 'back' or 'stored'
  end)
end
