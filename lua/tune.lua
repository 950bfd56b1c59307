-- include: dispatch settings
-- Change settings while requests wait, for every replica at once, then dispatch queued requests.
--
-- Guarantees: all changes take effect together, or none.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica
-- args[2] JSON {setting: value}, named as in publish; null removes a change
-- args[3] JSON {setting: value}: these changes in the operator's own words, for display; merged like args[2]
--
-- Returns {epoch, notifications, attempts, served, tuned version}; version '' while the pool is unknown

local function overlay(field, change)
  local text = read('HGET', key.pool, field)
  local all = text and cjson.decode(text) or {}
  for name, value in pairs(cjson.decode(change)) do
    if value == cjson.null then all[name] = nil else all[name] = value end
  end
  defer_write('HSET', key.pool, field, next(all) and cjson.encode(all) or '{}')
  return all
end

local function tune(args)
  reset_notifications(args[1])
  local version = ''
  if pool.known then
    local overrides = overlay('overrides', args[2])
    overlay('tuned', args[3])
    version = (tonumber(read('HGET', key.pool, 'tuned_version') or 0) or 0) + 1
    defer_write('HSET', key.pool, 'tuned_version', version)
    put_settings(cjson.decode(read('HGET', key.pool, 'base')), overrides)
    marks.update_caps()
    marks.update_bounds()
  end
  return finish_call({tostring(version)})
end
