-- include: dispatch
-- Change the published endpoints from one version to the next. What now fits is dispatched. In a large pool this costs
-- what the change is large, where publish costs what the pool is.
--
-- Guarantees: as publish, which a call for the whole new list would have left the same. Nothing is changed where
-- another version is published.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica
-- args[2] endpoints version that the changes begin from      args[3] the one that they lead to
-- then pairs: endpoint, JSON {labels, draining}, or '' where it is no longer published; limits of endpoints are part
--   of the settings, and changed by publish
--
-- Returns {epoch, notifications, attempts, served, changed (1; 0: another version is published)}

local FIRST_CHANGE = 4
local function publish_changes(args)
  reset_notifications(args[1])
  local changed = pool.known and read('HGET', key.pool, 'endpoints_version') == args[2] and 1 or 0
  if changed == 1 then
    local marked, addresses = endpoints.marked(), {}
    for at = FIRST_CHANGE, #args, 2 do addresses[#addresses + 1] = args[at] end
    endpoints.prefetch(addresses, #addresses)
    for at = FIRST_CHANGE, #args, 2 do
      local address, description = args[at], args[at + 1]
      local was_ready = endpoints.is_ready(address)
      if description == '' then
        write_now('HDEL', key.endpoints, address)
        endpoints.clear_marks(address)
        endpoints.remove_published(address)
      else
        write_now('HSET', key.endpoints, address, description)
        endpoints.add_published(address, endpoints.is_draining(description) or marked[address])
      end
      local is_ready = endpoints.is_ready(address)
      if was_ready ~= is_ready then pool.ready = pool.ready + (is_ready and 1 or -1) end
    end
    defer_write('HSET', key.pool, 'endpoints_version', args[3])
    pool.update_bounds()
  end
  local head = finish_call()
  head[5] = changed
  return head
end
