-- include: dispatch
-- Lower the used part of a limit of a tenant's node, at most to 0, then dispatch queued requests.
--
-- Guarantees: a tenant can never use more at once than the limit's burst or its budget. A repeated call counts once.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica   args[2] the node's path
-- args[3] unit and args[4] period of the limit (as in view_tenants)   args[5] amount   args[6] the call's id
--
-- Returns {epoch, notifications, attempts, served, left}; left '' if the node has no such limit

local function top_up_tenant(args)
  reset_notifications(args[1])
  local amount = tombstones.covers(args[6]) and 0 or tonumber(args[5])
  local left = pool.known and settings.tenants and quotas.top_up(args[2], args[3], args[4], amount)
  if left and amount ~= 0 then log_change('topped_up', table.concat({args[2], args[3], args[4], args[5]}, '\31')) end
  tombstones.put(args[6], now_ms)
  return finish_call({left and exact(left) or ''})
end
