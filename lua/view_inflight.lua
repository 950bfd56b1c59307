-- include: view
-- Requests in flight, a page of them: those first whose lease ends first. Reads only.
--
-- Guarantees: at most VIEW_LIMIT rows a call; of a walk by pages, one whose lease stays as it is comes once.
--
-- keys[1] epp:{POOL}:pool
-- args[1] end of the lease (ms) and args[2] id behind which to begin; '' and '': the first
-- args[3] rows wanted
-- Returns {now_us, in flight, row, end of its lease (ms)...}; rows as view_queue has them, or
--   the id alone of one without a record
local function view_inflight(args)
  local from = view.behind(key.inflight, args[1], args[2])
  local found = redis.call('ZRANGE', key.inflight, from, from + view.count(args[3]) - 1, 'WITHSCORES')
  local ids = {}
  for i = 1, #found, 2 do ids[#ids + 1] = found[i] end
  record.prefetch(ids, #ids)
  local reply = {full(now_us), redis.call('ZCARD', key.inflight)}
  for i = 1, #found, 2 do
    local r = record.read(found[i])
    reply[#reply + 1] = r and view.request(r) or found[i]
    reply[#reply + 1] = found[i + 1]
  end
  return reply
end
