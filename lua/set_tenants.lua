-- include: dispatch
-- Change the settings of tenants' nodes, then dispatch queued requests.
--
-- Guarantees: balances stay, so a changed limit grants no second burst. A node in `tenant_changes` replaces the same
-- node in `tenants`. A waiting request is charged once: if a node now charges at arrival, the request is charged now,
-- or evicted if the limit does not suffice. Each running request counts under a new bound; if there are more than
-- MOST_COUNTED requests, further calls count them.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica
-- args[2] `tenants` (from the configuration), `tenant_changes` (of operators), or the cursor of a former reply
-- args[3] and further, in pairs: path, JSON (lib/tenants.lua); '' removes the node
--
-- Returns {epoch, notifications, attempts, served, version, cursor}; version '' while the pool is unknown; cursor of
-- the requests that further calls must count, '' without any

local MOST_COUNTED = 5000 -- requests

-- Return the requests in flight, or those that wait (`set`), the earliest first.
local function requests_in(set)
  local found, ids = {}, read('ZRANGE', set, 0, MOST_COUNTED - 1)
  record.prefetch(ids, #ids)
  for _, id in ipairs(ids) do found[#found + 1] = record.read(id) end
  return found
end

local function set_tenants(args)
  reset_notifications(args[1])
  if tonumber(args[2]) then
    return finish_call({'', pool.known and settings.tenants and quotas.count_more(args[2]) or ''})
  end
  local hash = ({tenants = key.tenants, tenant_changes = key.tenant_changes})[args[2]]
  if not hash then error({err = 'ERR no hash of tenants: ' .. args[2]}, 0) end
  local version, cursor, counts_running, moves_charges = '', '', false, false
  if pool.known then
    for at = 3, #args, 2 do
      -- If a node is removed, the configured node or a default for its level is in force again, which may have a bound.
      local path, node = args[at], args[at + 1]
      counts_running = counts_running or node == '' or string.find(node, 'max_parallel', 1, true)
      moves_charges = moves_charges or node == '' or string.find(node, 'over_limit', 1, true)
        or settings.tenants and tenants.node(path).over_limit ~= 'queue'
    end
    local waiting = settings.tenants and (moves_charges or counts_running) and requests_in(key.timers) or {}
    table.sort(waiting, function(a, b) return a.arrived == b.arrived and a.id < b.id or a.arrived < b.arrived end)
    local refused = quotas.change_nodes(moves_charges and waiting or {}, function()
      for at = 3, #args, 2 do
        if args[at + 1] == '' then
          defer_write('HDEL', hash, args[at])
        else
          defer_write('HSET', hash, args[at], args[at + 1])
        end
      end
    end, function()
      for at = 3, #args, 2 do log_change('tenant', args[at] .. '\31' .. args[2] .. '\31' .. args[at + 1]) end
      if settings.tenants and counts_running then
        -- A new bound has not counted the running requests, but their ends will lower its count.
        if read('HLEN', key.requests) > MOST_COUNTED then
          quotas.void_counts()
          cursor = '0'
        else
          local found = requests_in(key.inflight)
          for _, r in ipairs(waiting) do found[#found + 1] = r end
          quotas.recount(found)
        end
      end
    end)
    for _, r in ipairs(refused) do end_and_notify(r, NOTIFY_EVICTED) end
    version = (tonumber(read('HGET', key.pool, 'tenants_version') or 0) or 0) + 1
    defer_write('HSET', key.pool, 'tenants_version', version)
    pool.touched = true
    if settings.tenants then
      for _, band in ipairs(BANDS) do -- a limit may have been raised
        for _, member in ipairs(read('ZRANGE', key.throttled[band], 0, 99)) do
          queue.unthrottle(band, member)
        end
      end
    end
  end
  return finish_call({tostring(version), cursor})
end
