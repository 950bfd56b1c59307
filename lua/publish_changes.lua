-- include: dispatch
-- Change the published endpoints from one version of the list to the next, then dispatch queued requests. A call costs
-- time in proportion to the changed endpoints, while a call of the script publish costs time for all endpoints.
--
-- Guarantees: the result is the same as with the script publish and the whole new list. If the published version is not
-- args[2], nothing changes.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica
-- args[2] endpoints version before the changes      args[3] endpoints version after them
-- args[4] and further, in pairs: endpoint, JSON as in publish; '' unpublishes the endpoint (limits of endpoints are
--   settings, which only publish changes)
--
-- Returns {epoch, notifications, attempts, served, changed (1; 0: another version is published)}

local FIRST_CHANGE = 4
local function publish_changes(args)
  reset_notifications(args[1])
  local changed = pool.known and read('HGET', key.pool, 'endpoints_version') == args[2] and 1 or 0
  if changed == 1 then
    local marked, addresses = marks.all(), {}
    for at = FIRST_CHANGE, #args, 2 do addresses[#addresses + 1] = args[at] end
    endpoints.prefetch(addresses, #addresses)
    local former = read('HMGET', key.endpoints, unpack(addresses))
    for i, address in ipairs(addresses) do former[address] = former[i] or nil end
    for at = FIRST_CHANGE, #args, 2 do
      local was_ready = endpoints.is_ready(args[at])
      local before, after = former[args[at]], args[at + 1]
      local is_ready = marks.publish(args[at], after, before, marked)
      if before then marks.count_stages(endpoints.described(before), -1) end
      if after ~= '' then marks.count_stages(endpoints.described(after), 1) end
      if was_ready ~= is_ready then pool.ready = pool.ready + (is_ready and 1 or -1) end
    end
    defer_write('HSET', key.pool, 'endpoints_version', args[3])
    marks.try_ejected()
    marks.update_bounds()
  end
  return finish_call({changed})
end
