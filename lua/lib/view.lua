-- include: queue
-- What an operator reads: rows as text, their fields parted by byte 31, which no field can hold. Nothing is
-- written here, and no call looks at more than VIEW_LIMIT rows, however long the queue is.
local VIEW_LIMIT = 64
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
-- A lane that has waiting requests. `group` is its band, plus 3 if it is parked; its oldest request speaks for all.
function view.lane(group, lane, tag)
  local band = group % 3
  local length, requests = queue.length(band, lane)
  local id = redis.call('ZRANGE', requests, 0, 0)[1]
  local r = id and record.read(id)
  if not r then return string.format('%d\31%s\31%s\31%d\31%.17g\0311\0311\31', group, lane, tag, length, now_us) end
  local in_flight = r.limit > 0 and (redis.call('HGET', key.limits, r.flow) or '0') or ''
  return string.format('%d\31%s\31%s\31%d\31%.17g\31%.17g\31%.17g\31%s', group, lane, tag, length, r.arrived,
    settings.weights[r.flow] or r.weight, queue.share(r), in_flight)
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
