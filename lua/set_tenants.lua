-- include: dispatch
-- Change the settings of tenants' nodes, then dispatch queued requests.
--
-- Guarantees: balances stay, so a changed limit grants no second burst. A node in `tenant_changes` replaces the same
-- node in `tenants`. A request keeps its charges; limits that have not charged a request do so when it starts.
-- A new `max_parallel` also counts running requests: this call counts some of them, and later sweeps the others.
-- Since a limit may have been raised, this call unthrottles the changed nodes; if a default has changed, sweeps
-- unthrottle all nodes.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica
-- args[2] `tenants` (from the configuration) or `tenant_changes` (of operators)
-- args[3] and further, in pairs: path, JSON (lib/tenants.lua); '' removes the node. The path '' of a first pair stands
--   for the version of the nodes on which the change is based
--
-- Returns {epoch, notifications, attempts, served, version}; version '' while the pool is unknown, 'stale' if another
--   version than the caller's is in force, so that nothing was changed

local function set_tenants(args)
  reset_notifications(args[1])
  local hash = ({tenants = key.tenants, tenant_changes = key.tenant_changes})[args[2]]
  if not hash then error({err = 'ERR no hash of tenants: ' .. args[2]}, 0) end
  local version, counts_running, changes_default = '', false, false
  if pool.known then
    local first, former = 3, read('HGET', key.pool, 'tenants_version') or ''
    if args[3] == '' then
      if args[4] ~= former then return finish_call({'stale'}) end
      first = 5
    end
    for at = first, #args, 2 do
      local path, node = args[at], args[at + 1]
      if node == '' then defer_write('HDEL', hash, path) else defer_write('HSET', hash, path, node) end
      log_change('tenant', path .. '\31' .. args[2] .. '\31' .. node)
      -- A removed node may bring the configured node or a default back into force, which may set `max_parallel`.
      counts_running = counts_running or node == '' or string.find(node, 'max_parallel', 1, true)
      if string.sub(path, -1) == '*' then
        changes_default = true
      elseif settings.tenants then
        quotas.ease({path = path, kind = {over_limit = 'queue'}})
      end
    end
    quotas.forget()
    version = (tonumber(former) or 0) + 1
    defer_write('HSET', key.pool, 'tenants_version', version)
    pool.touched = true
    if settings.tenants then
      if counts_running then quotas.count_running('0') end
      if changes_default then
        defer_write('HSET', key.pool, 'throttled_page', queue.LAST_PAGE)
        defer_write('HSET', key.pool, 'throttled_walk', '1')
        defer_write('HSET', key.pool, 'sweep_more', '1')
      end
    end
  end
  return finish_call({tostring(version)})
end
