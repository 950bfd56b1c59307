-- include: settings
-- Change settings while requests wait, for every replica at once; what now fits is dispatched.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica
-- args[2] JSON {setting: value}, named as publish has them; null takes a change back
-- args[3] JSON the same changes as the operator named them, for whoever asks; overlaid likewise
-- Returns {born, news, attempts, served, tuned version}, or version '' while the pool is unknown
local function overlay(field, change)
  local text = redis.call('HGET', key.pool, field)
  local all = text and cjson.decode(text) or {}
  for name, value in pairs(cjson.decode(change)) do
    if value == cjson.null then all[name] = nil else all[name] = value end
  end
  later('HSET', key.pool, field, next(all) and cjson.encode(all) or '{}')
  return all
end
local function tune(args)
  forget_news(args[1])
  local version = ''
  if pool.known then
    local overrides = overlay('overrides', args[2])
    overlay('tuned', args[3])
    version = (tonumber(redis.call('HGET', key.pool, 'tuned_version') or 0) or 0) + 1
    later('HSET', key.pool, 'tuned_version', version)
    put_settings(cjson.decode(redis.call('HGET', key.pool, 'base')), overrides)
    pool.bound()
  end
  return conclude({tostring(version)})
end
