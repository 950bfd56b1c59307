-- include: pool
-- The decision log: one stream entry an event, in the order of decisions; off when log_max is 0.
-- Written at the end of a call: one that fails on its way, and may be asked again, leaves no entry.
-- `tag` is a lane's start tag at this moment, `by` turn or guard, `note` as docs/redis-schema.md lists it.
local entries, logged = {}, 0
local function full(number) return string.format('%.17g', number) end
local function log(event, r, tag, by, about)
  if settings.log_max == 0 then return end
  pool.log_seq = pool.log_seq + 1
  logged = logged + 1
  entries[logged] = {'MAXLEN', '~', settings.log_max, '*',
    'seq', full(pool.log_seq), 'time_us', full(now_us), 'event', event, 'request', r.id, 'flow', r.flow,
    'band', r.band, 'workload', r.workload, 'cost', full(r.cost), 'weight', full(r.weight),
    'arrived', full(r.arrived), 'deadline_ms', full(r.deadline_ms), 'due_ms', r.due_ms and full(r.due_ms) or '',
    'limit', full(r.limit), 'tag', tag and full(tag) or '', 'v', full(pool[V[r.band]]), 'by', by or '',
    'owner', r.owner, 'endpoint', string.match(r.endpoints, '^[^,]*'), 'stock', full(pool.stock),
    'queued', full(pool.queued), 'upper', full(pool.upper), 'lower', full(pool.lower),
    'note', type(about) == 'number' and full(about) or about or ''}
end
local function send_log()
  for i = 1, logged do
    if entries[i] then redis.call('XADD', key.log, unpack(entries[i])) end
    entries[i] = false
  end
end
local function forget_log()
  if logged > 0 then entries, logged = {}, 0 end
end
-- Something about a lane or the whole pool rather than a request.
local NOBODY = {
  id = '', flow = '', band = 0, workload = '', cost = 0, weight = 1, arrived = 0, deadline_ms = 0, limit = 0,
  owner = '', endpoints = '',
}
local function log_change(event, note_text) log(event, NOBODY, nil, nil, note_text) end
local function log_lane(event, band, lane, tag)
  if settings.log_max == 0 then return end
  local about = {}
  for name, value in pairs(NOBODY) do about[name] = value end
  about.band, about.flow = band, lane
  log(event, about, tag)
end
