-- include: dispatch
-- Change the settings of tenants' nodes, then dispatch queued requests.
--
-- Guarantees: balances stay, so a changed limit grants no second burst. A node that `tenant_changes` has is in force
-- instead of the same node in `tenants`.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica
-- args[2] `tenants` (from the configuration) or `tenant_changes` (of operators)
-- then pairs: path, JSON (lib/tenants.lua); '' removes the node
--
-- Returns {epoch, notifications, attempts, served, version}; version '' while the pool is unknown

local MOST_COUNTED = 5000 -- running requests, and as many waiting ones

local function set_tenants(args)
  reset_notifications(args[1])
  local hash = ({tenants = key.tenants, tenant_changes = key.tenant_changes})[args[2]]
  if not hash then error({err = 'ERR no hash of tenants: ' .. args[2]}, 0) end
  local version, counts_running = '', false
  if pool.known then
    for at = 3, #args, 2 do
      -- A removed node may uncover one with a bound: the configured one, or a default for unknown children.
      local path, node = args[at], args[at + 1]
      counts_running = counts_running or node == '' or string.find(node, 'max_parallel', 1, true)
      if node == '' then
        defer_write('HDEL', hash, path)
      else
        defer_write('HSET', hash, path, node)
      end
      log_change('tenant', path .. '\31' .. args[2] .. '\31' .. node)
    end
    version = (tonumber(read('HGET', key.pool, 'tenants_version') or 0) or 0) + 1
    defer_write('HSET', key.pool, 'tenants_version', version)
    pool.touched = true
    quotas.forget()
    if settings.tenants and counts_running then
      -- A new bound has not counted the requests that it was not yet charged for: their ends would lower its count.
      local found = {}
      for _, set in ipairs({key.inflight, key.timers}) do
        local ids = read('ZRANGE', set, 0, MOST_COUNTED - 1)
        record.prefetch(ids, #ids)
        for _, id in ipairs(ids) do found[#found + 1] = record.read(id) end
      end
      quotas.recount(found)
    end
    if settings.tenants then
      for _, band in ipairs(BANDS) do -- a limit may have been raised
        for _, member in ipairs(read('ZRANGE', key.throttled[band], 0, 99)) do
          queue.unthrottle(band, member)
        end
      end
    end
  end
  return finish_call({tostring(version)})
end
