-- include: dispatch
-- Settings in force: what the configuration gives, overlaid by what was changed live.
local function put_settings(base, overrides)
  local changed = false
  for name, value in pairs(overrides) do base[name] = value end
  -- What decides where a waiting request stands: those that wait are filed anew, by the sweep, in chunks.
  for _, name in ipairs({'fairness', 'ordering', 'wait_signal', 'wait_weight', 'criticality_weight', 'rate_weight',
    'wait_cap_ms', 'rate_cap'}) do
    changed = changed or settings[name] ~= base[name]
  end
  local text = cjson.encode(base)
  if base.log_max == 0 then log_change('tuned', text) end -- the last entry says that there will be no more
  settings, settings_text = base, nil
  later('HSET', key.pool, 'settings', text)
  pool.touched = true
  if changed and pool.queued > 0 then
    pool.refiling = 1
    later('HSET', key.pool, 'walk', '0')
  end
  log_change('tuned', text)
end
