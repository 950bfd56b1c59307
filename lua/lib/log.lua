-- include: pool
-- The decision log: one stream entry an event, in the order of decisions; off when log_max is 0.
local function log(event, r, tag)
  if pool.log_max == 0 then return end
  pool.add('log_seq', 1)
  redis.call('XADD', key.log, 'MAXLEN', '~', pool.log_max, '*',
    'seq', pool.log_seq, 'time_us', now_us, 'event', event, 'request', r.id, 'flow', r.flow,
    'band', r.band, 'workload', r.workload, 'cost', r.cost, 'arrived', r.arrived, 'tag', tag or '',
    'endpoint', r.endpoints or '', 'stock', pool.stock, 'queued', pool.queued, 'upper', pool.upper)
end
