-- include: dispatch settings
-- Set the limits that the fleet has found for its endpoints, then dispatch queued requests.
--
-- Guarantees: a lower limit ends no running request; an endpoint above its limit gets no request until enough requests
-- have ended (G1). Unless the setting `adaptive` is 1, the limits are stored without effect.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica
-- args[2] JSON {endpoint: limit}, of all endpoints; "unit": the limits' unit, if not requests; "prefill": {endpoint:
--   limit} of the stage prefill; "doubling": the endpoints, those of the stage prefill as "prefill=ENDPOINT", whose
--   limits still double
-- args[3] JSON {endpoint: {...}}: the state of the controller, which the scripts do not read (fleet/limits.py)
--
-- Returns {epoch, notifications, attempts, served}

local function set_limits(args)
  reset_notifications(args[1])
  if pool.known then
    local changed = read('HGET', key.pool, 'limits') ~= args[2]
    defer_write('HSET', key.pool, 'limits', args[2])
    defer_write('HSET', key.pool, 'limit_state', args[3])
    if changed and settings.adaptive == 1 then
      local overrides = read('HGET', key.pool, 'overrides')
      put_settings(cjson.decode(read('HGET', key.pool, 'base')), overrides and cjson.decode(overrides) or {})
      marks.update_caps()
      marks.update_bounds()
    end
  end
  return finish_call()
end
