-- include: queue
-- What an operator reads: rows as text, their fields parted by byte 31, which no field can hold. Nothing is
-- written here, and no call looks at more than VIEW_LIMIT rows, however long the queue is.
local VIEW_LIMIT = 51 -- a page of fifty, and whether there are more
local view = {}
function view.count(text) return math.max(1, math.min(tonumber(text) or VIEW_LIMIT, VIEW_LIMIT)) end
local function comes_before(a, b) -- as a sorted set orders members: by their bytes
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x < y end
  end
  return #a < #b
end
-- The rank of the first that stands behind (score, member), whether that is still there or not.
function view.behind(sorted, score, member)
  if score == '' then return 0 end
  local rank = redis.call('ZRANK', sorted, member)
  if rank and tonumber(redis.call('ZSCORE', sorted, member)) == tonumber(score) then return rank + 1 end
  local low, high = redis.call('ZCOUNT', sorted, '-inf', '(' .. score), redis.call('ZCOUNT', sorted, '-inf', score)
  while low < high do
    local middle = math.floor((low + high) / 2)
    if comes_before(member, redis.call('ZRANGE', sorted, middle, middle)[1]) then
      high = middle
    else
      low = middle + 1
    end
  end
  return low
end
-- Lanes that have waiting requests, names and start tags in turn, each as a row at the end of `reply`. `group` is
-- their band, plus 3 if they are parked; a lane's first request (its oldest, but under edf) speaks for all.
function view.add_lanes(reply, group, lanes)
  local band, heads = group % 3, {}
  for i = 1, #lanes, 2 do
    heads[#heads + 1] = redis.call('ZRANGE', key.queue[band][lanes[i]], 0, 0)[1] or ''
  end
  record.prefetch(heads, #heads)
  for i = 1, #lanes, 2 do
    local lane, tag, r = lanes[i], lanes[i + 1], record.read(heads[(i + 1) / 2])
    local length = queue.length(band, lane)
    if r then
      local in_flight = r.limit > 0 and (redis.call('HGET', key.limits, r.flow) or '0') or ''
      reply[#reply + 1] = string.format('%d\31%s\31%s\31%d\31%.17g\31%.17g\31%.17g\31%s', group, lane, tag, length,
        r.arrived, settings.weights[r.flow] or r.weight, queue.share(r), in_flight)
    else
      reply[#reply + 1] = string.format('%d\31%s\31%s\31%d\31%.17g\0311\0311\31', group, lane, tag, length, now_us)
    end
  end
end
function view.lanes(group) return (group < 3 and key.flows or key.parked)[group % 3] end
local function score_parts(r)
  if settings.ordering ~= 'workload-aware' then return '', '', '' end
  local waited = (now_us - r.arrived) / 1000
  if settings.wait_signal == 'workload_average' and r.workload ~= '' then waited = workloads.wait_ms(r.workload) end
  return full(settings.wait_weight * math.min(waited / settings.wait_cap_ms, 1)),
    full(settings.criticality_weight * r.criticality / 5),
    full(-settings.rate_weight * math.min(workloads.rate(r.workload) / settings.rate_cap, 1))
end
function view.request(r, is_overdue)
  local wait, criticality, rate = score_parts(r)
  return string.format(
    '%s\31%s\31%s\31%s\31%d\31%s\31%s\31%d\31%.17g\31%.17g\31%.17g\31%.17g\31%d\31%s\31%.17g\31%s\31%s\31%s',
    r.id, r.state, r.owner, r.flow, r.band, r.workload, r.model, r.criticality, r.cost, r.arrived, r.deadline_ms,
    queue.due_ms(r), is_overdue and 1 or 0, r.endpoints, r.limit, wait, criticality, rate)
end
function view.workload(id, text)
  local w = parse_workload(id, text)
  return string.format('%s\31%.17g\31%.17g\31%.17g\31%.17g\31%.17g\31%.17g', id, w[1], w[2], w[3], w[4], w[5],
    workloads.rate(id))
end
