-- include: view
-- Workloads of the registry, a page of them, in no order. Reads only.
--
-- keys[1] epp:{POOL}:pool
-- args[1] cursor ('0' to begin)   args[2] rows wanted; some more may come
-- Returns {now_us, workloads, next cursor ('0': that was all), row...}; a row: id, total, active, dispatched,
--   average wait (ms), last request (ms), requests a second
local function view_workloads(args)
  local scan = redis.call('HSCAN', key.workloads, args[1], 'COUNT', view.count(args[2]))
  local reply = {full(now_us), redis.call('HLEN', key.workloads), scan[1]}
  for i = 1, #scan[2], 2 do reply[#reply + 1] = view.workload(scan[2][i], scan[2][i + 1]) end
  return reply
end
