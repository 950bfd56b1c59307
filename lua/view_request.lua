-- include: view
-- One request: where it is, and who stands before it. Reads only.
--
-- keys[1] epp:{POOL}:pool
-- args[1] request id
-- Returns {now_us} if it is unknown, else {now_us, row (as view_queue has it), rank in its lane, row of its
--   lane (as view_flows has it), rank among the overdue, end of its lease (ms)}; '' for what it has not
local function view_request(args)
  local id = args[1]
  local r = record.read(id)
  if not r then return {full(now_us)} end
  local overdue = redis.call('ZRANK', key.overdue, id) or ''
  local rank, lane_rows = '', {}
  if r.state == 'queued' then
    for _, lane in ipairs({queue.lane(r), queue.lane(r) == '' and r.flow or ''}) do
      local found = redis.call('ZRANK', key.queue[r.band][lane], id)
      if found and rank == '' then
        rank = found
        for _, group in ipairs({r.band, r.band + 3}) do
          local tag = redis.call('ZSCORE', view.lanes(group), lane)
          if tag then view.add_lanes(lane_rows, group, {lane, tag}) end
        end
      end
    end
  end
  return {full(now_us), view.request(r, overdue ~= ''), rank, lane_rows[1] or '', overdue,
    redis.call('ZSCORE', key.inflight, id) or ''}
end
