-- include: view
-- Waiting requests by their ranks in their lanes: by arrival, under `ordering: edf` by deadline. Reads only.
--
-- Guarantees: at most VIEW_LIMIT rows a call.
--
-- keys[1] epp:{POOL}:pool
-- args    for each stretch of a lane VIEW_STRETCH arguments: band, lane, first rank, last rank
-- Returns {now_us, {rows of each stretch}...}; a row: id, state, owner, flow, band, workload, model, criticality,
--   cost, arrival (us), deadline_ms, due_ms (when it is overdue), overdue (0 or 1), endpoints, limit,
--   parts of its score (wait, criticality, rate; '' unless `workload-aware`)
local VIEW_STRETCH = 4
local function view_queue(args)
  local ids, counts = {}, {}
  for at = 1, #args, VIEW_STRETCH do
    local band, lane, first, last = tonumber(args[at]), args[at + 1], tonumber(args[at + 2]), tonumber(args[at + 3])
    local found = first <= last and redis.call('ZRANGE', key.queue[band][lane], first, last) or {}
    counts[#counts + 1] = 0
    for i = 1, math.min(#found, VIEW_LIMIT - #ids) do
      ids[#ids + 1] = found[i]
      counts[#counts] = i
    end
  end
  record.prefetch(ids, #ids)
  local overdue = pool.overdue > 0 and #ids > 0 and redis.call('ZMSCORE', key.overdue, unpack(ids)) or {}
  local reply, at = {full(now_us)}, 0
  for i = 1, #counts do
    local rows = {}
    for _ = 1, counts[i] do
      at = at + 1
      local r = record.read(ids[at])
      if r then rows[#rows + 1] = view.request(r, overdue[at]) end
    end
    reply[#reply + 1] = rows
  end
  return reply
end
