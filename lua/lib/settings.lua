-- include: flows
-- Applies new settings, which may change the order of the queue. Uses `endpoints`, `tenants`, `quotas` and `bands`.
-- Defines `put_settings`.

-- Add the endpoint limits that the fleet has found to the settings `base`: `caps` maps an endpoint to its limit;
-- `default_cap` is the limit of every endpoint that `caps` lacks. `prefill_caps` and `default_prefill_cap` are the same
-- for the stage prefill. A found limit is at most the limit from discovery (`base.caps`); a pinned limit replaces the
-- found limit. Limits in tokens are `token_caps` and `default_token_cap`; `caps` then has only discovery's limits.
-- While a limit still doubles, it says little about its endpoint. So the choice of an endpoint compares the loads of
-- such endpoints with the highest of these limits (`compared_caps`, `compared_prefill_caps`): equal ones share equally.
local function add_limits(base)
  local function bounded(limit) return math.max(base.limit_min, math.min(limit, base.limit_max or limit)) end
  local decoded, found = pcall(cjson.decode, read('HGET', key.pool, 'limits') or '{}')
  local in_tokens = base.unit == 'tokens'
  -- Ignore limits in another unit, left by a rolling restart: a limit of 9000 tokens is no limit of 9000 requests.
  local usable = decoded and type(found) == 'table' and (found.unit == 'tokens') == in_tokens
  found = usable and found or {}
  local default_cap, doubling = bounded(base.limit_initial), {}
  for _, name in ipairs(found.doubling or {}) do doubling[name] = true end
  local function limits(found_ones, published, prefix)
    local caps, compared_caps, highest = {}, {}, 0
    for address, limit in pairs(found_ones) do
      if type(limit) == 'number' then caps[address] = bounded(limit) end
    end
    for address, limit in pairs(not in_tokens and published or {}) do
      caps[address] = math.min(limit, caps[address] or default_cap)
    end
    for address, limit in pairs(base.pinned or {}) do caps[address] = limit end
    for address, cap in pairs(caps) do
      local limit = found_ones[address]
      if doubling[prefix .. address] and type(limit) == 'number' and cap == bounded(limit) then
        compared_caps[address], highest = cap, math.max(highest, cap)
      end
    end
    for address in pairs(compared_caps) do compared_caps[address] = highest end
    return caps, compared_caps
  end
  local caps, compared_caps = limits(found, base.caps, '')
  if not in_tokens then
    local of_prefill = type(found.prefill) == 'table' and found.prefill or {}
    base.prefill_caps, base.compared_prefill_caps = limits(of_prefill, base.prefill_caps, 'prefill=')
    base.default_prefill_cap = default_cap
  else
    base.token_caps, base.default_token_cap, caps, default_cap = caps, default_cap, base.caps or {}, nil
  end
  base.caps, base.compared_caps, base.default_cap = caps, compared_caps, default_cap
end

-- Put settings in force: the published configuration `base`, overlaid by the live changes `overrides`.
local function put_settings(base, overrides)
  local changed = false
  for name, value in pairs(overrides) do base[name] = value end
  if base.adaptive == 1 then add_limits(base) else base.adaptive = nil end
  -- If one of these settings changes, the order of queued requests may change.
  for _, name in ipairs({'fairness', 'ordering', 'wait_signal', 'wait_weight', 'criticality_weight', 'rate_weight',
    'wait_cap_ms', 'rate_cap'}) do
    changed = changed or settings[name] ~= base[name]
  end
  local former, separator = settings.tenants, base.tenants and base.tenants.separator
  base.tenancy = settings.tenancy
  local switched = (former == nil) ~= (separator == nil)
  if switched then base.tenancy = quotas.restart() end
  local text = cjson.encode(base)
  if pool.queued > 0 and (former and former.separator) ~= separator then
    pool.note_lost('tenants') -- the next publish rebuilds the order from the records
  end
  if base.log_max == 0 then log_change('tuned', text) end -- the log ends with this entry
  local counted = settings.token_caps
  settings, settings_text = base, nil
  tenants.use_separator()
  bands.configure(settings)
  -- If limits in tokens are switched on or off, count the tokens in flight from the records.
  if (counted == nil) ~= (settings.token_caps == nil) then
    for _, address in ipairs(endpoints.counted()) do endpoints.add_amount(address, 0, true) end
    for _, id in ipairs(settings.token_caps and read('ZRANGE', key.inflight, 0, -1) or {}) do
      local r = record.read(id)
      if r and r.state == STATE_PLACED then endpoints.add_amount(endpoints.first(r.endpoints), r.taken) end
    end
  end
  defer_write('HSET', key.pool, 'settings', text)
  pool.touched = true
  if changed and pool.queued > 0 then -- the sweep moves all waiting requests to their new positions, chunk by chunk
    pool.refiling = 1
    defer_write('HSET', key.pool, 'walk', '0')
  end
  log_change('tuned', text)
  if switched and separator then quotas.count_running('0') end
end
