-- include: dispatch upkeep settings
-- Set the settings and the endpoints of the pool, then dispatch. The first call creates the pool; the first call after
-- a key was lost rebuilds the pool from the records of its requests (lib/upkeep.lua).
--
-- Guarantees: an endpoint that is no longer published keeps its load until its last request ends.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica
-- args[2] config version      args[3] endpoints version
-- args[4] settings: JSON, named as in docs/redis-schema.md
-- args[5] and further, in pairs: endpoint, JSON {labels, draining, max_inflight, stages}; stages: any of `decode`,
--   `prefill` and `encode`, separated by blanks; an endpoint without the field `stages` only decodes
--
-- Returns {epoch, notifications, attempts, served, upper, lower, ready, records from which the pool was rebuilt (-1: no
--   rebuild), the lost key ('' for `pool`)}; bounds as strings. If the epoch is '0', call again: records are left.

local FIRST_ENDPOINT = 5
local function publish(args)
  reset_notifications(args[1])
  pool.create()
  local records, lost = {}, ''
  if not pool.known then records, lost = upkeep.take_records() end
  if not records then
    finish_call()
    return {'0', {}, 0, 0, '0', '0', 0, -1, ''}
  end
  local wanted, ready, marked, addresses = {}, 0, marks.all(), {}
  for at = FIRST_ENDPOINT, #args, 2 do addresses[#addresses + 1] = args[at] end
  endpoints.prefetch(addresses, #addresses)
  local known = read('HGETALL', key.endpoints)
  local former = {}
  for i = 1, #known, 2 do former[known[i]] = known[i + 1] end
  pool.prefillers, pool.prefill_only = 0, 0
  for at = FIRST_ENDPOINT, #args, 2 do
    local address = args[at]
    wanted[address] = endpoints.described(args[at + 1])
    marks.count_stages(wanted[address], 1)
    if marks.publish(address, args[at + 1], former[address], marked) then ready = ready + 1 end
  end
  for address in pairs(former) do
    if not wanted[address] then marks.publish(address, '', former[address]) end
  end

  -- All other endpoints with a load are unpublished: they keep their load, but take no new requests.
  for _, address in ipairs(endpoints.counted()) do
    if not wanted[address] then marks.unpublish(endpoints, address) end
  end
  for _, address in ipairs(prefill.counted()) do
    if not (wanted[address] and wanted[address].prefill) then marks.unpublish(prefill, address) end
  end
  local is_new = not pool.known
  if is_new then
    pool.epoch = now_us
    if lost == '' then pool.credit = 1 end
    pool.known = true
  end
  local overrides = read('HGET', key.pool, 'overrides')
  defer_write('HSET', key.pool, 'config_version', args[2])
  defer_write('HSET', key.pool, 'endpoints_version', args[3])
  defer_write('HSET', key.pool, 'base', args[4])
  put_settings(cjson.decode(args[4]), overrides and cjson.decode(overrides) or {})
  marks.update_caps()
  pool.ready = ready
  marks.try_ejected()
  marks.update_bounds()
  if is_new then upkeep.file_records(records, lost) end
  return finish_call({exact(pool.upper), exact(pool.lower), pool.ready, is_new and #records or -1, lost})
end
