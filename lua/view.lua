-- include: flows
-- Functions that read the pool for the admin API. Rows are text, with fields separated by byte 31, which no field
-- contains.
--
-- Guarantees: each function only reads, and reads at most VIEW_LIMIT rows a call, however long the queue is. A member
-- whose score does not change meanwhile is on exactly one of consecutive pages.
--
-- Each function gets in keys[1] the key epp:{POOL}:pool.
--
-- Rows:
--   flow queue: throttled (0 or 1), priority of its band, name, start tag (with tenants as if it were a child of the
--     root), queued, arrival of the oldest (us), weight, share (added to the tag by serving one request), in flight
--     ('': not counted)
--   request: id, state, owner, flow, priority of its band, workload, model, criticality, cost, arrival (us),
--     deadline_ms, due_ms (when it is overdue), overdue (0 or 1), endpoints, limit, score parts (wait, criticality,
--     rate; '' unless `workload-aware`), prefill endpoints while they compute its prompt
--   workload: id, total, active, dispatched, average wait (ms), last request (ms), requests per second

local view = {}
function view.rows_wanted(text) return math.max(1, math.min(tonumber(text) or VIEW_LIMIT, VIEW_LIMIT)) end
local function comes_before(a, b) -- compares names by their bytes, as Redis orders members of equal score
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x < y end
  end
  return #a < #b
end

-- Return the rank of a sorted set's first member after the position (score, member), even if `member` has left the set.
function view.rank_behind(sorted, score, member)
  if score == '' then return 0 end
  local rank = read('ZRANK', sorted, member)
  if rank and tonumber(read('ZSCORE', sorted, member)) == tonumber(score) then return rank + 1 end
  local low, high = read('ZCOUNT', sorted, '-inf', '(' .. score), read('ZCOUNT', sorted, '-inf', score)
  while low < high do
    local middle = math.floor((low + high) / 2)
    if comes_before(member, read('ZRANGE', sorted, middle, middle)[1]) then
      high = middle
    else
      low = middle + 1
    end
  end
  return low
end

-- Append a row for each of `flow_queues` (name, start tag, name, start tag ...). Arrival, weight and share are taken
-- from the flow queue's first request: its oldest or, under edf, the request with the earliest deadline. `scales`, if
-- given, has a factor for each flow queue's share.
function view.add_flow_queues(reply, band, throttled, flow_queues, scales)
  local heads = {}
  for i = 1, #flow_queues, 2 do
    heads[#heads + 1] = read('ZRANGE', key.queue[band][flow_queues[i]], 0, 0)[1] or ''
  end
  record.prefetch(heads, #heads)
  for i = 1, #flow_queues, 2 do
    local flow_queue, tag, r = flow_queues[i], flow_queues[i + 1], record.read(heads[(i + 1) / 2])
    local arrived, weight, share, in_flight = now_us, 1, 1, ''
    if r then
      arrived, share = r.arrived, queue.share(r)
      weight = settings.tenants and tenants.weight(r.flow) or settings.weights[r.flow] or r.weight
      if r.limit > 0 then in_flight = read('HGET', key.limits, r.flow) or '0' end
    end
    if scales then share = share * scales[flow_queue] end
    reply[#reply + 1] = string.format(FLOW_QUEUE_ROW, throttled, PRIORITY[band], flow_queue, tag,
      queue.length(band, flow_queue), arrived, weight, share, in_flight)
  end
end

-- Return the key of a band's ordered flow queues (`throttled` 0) or throttled flow queues (1).
function view.flow_queues(band, throttled) return (throttled == 0 and key.flows or key.throttled)[band] end

-- With tenants: append the leaves below `parent` to `found` (name, start tag, name, start tag ...), with start tags as
-- if they were children of the root. While all children of a node are backlogged, each turn of the node raises its tag
-- by 1 / weight, and the virtual time of its children by 1 / (sum of their weights), for a cost of 1. So a difference
-- of tags below the node, times `scale`, is a difference of the root's tags. `start` is the tag of `parent`.
local MOST_LEAVES = 400
function view.add_leaves(found, scales, members, start, scale)
  local weights, sum = {}, 0
  for i = 1, #members, 2 do
    weights[i] = tenants.weight(members[i]) or settings.weights[members[i]] or 1
    sum = sum + weights[i]
  end
  for i = 1, #members, 2 do
    local member, below = members[i], start and scale * sum or 1
    local tag = start and start + (members[i + 1] - members[2]) * below or tonumber(members[i + 1])
    if not tenants.is_inner(member) then
      found[#found + 1], found[#found + 2], scales[member] = member, tag, below
    elseif #found < 2 * MOST_LEAVES then
      local children = read('ZRANGE', key.children[view.band][member], 0, MOST_LEAVES - 1, 'WITHSCORES')
      view.add_leaves(found, scales, children, tag, below / weights[i])
    end
  end
end

-- A band's ordered or throttled flow queues, with start tags, and the factors of their shares; sorted by tag and name.
function view.leaves(band, throttled)
  local found, scales, sorted = {}, {}, {}
  view.band = band
  local members = read('ZRANGE', view.flow_queues(band, throttled), 0, MOST_LEAVES - 1, 'WITHSCORES')
  view.add_leaves(found, scales, members)
  for i = 1, #found, 2 do sorted[#sorted + 1] = {found[i], found[i + 1]} end
  table.sort(sorted, function(a, b) return a[2] < b[2] or (a[2] == b[2] and comes_before(a[1], b[1])) end)
  return sorted, scales
end

-- With tenants, return the number of a band's flow queues, and `wanted` flow queues after the position (start tag,
-- name).
function view.page_of_leaves(band, throttled, score, member, wanted)
  local sorted, scales = view.leaves(band, throttled)
  local page, after = {}, tonumber(score)
  for _, leaf in ipairs(sorted) do
    local is_after = not after or leaf[2] > after or (leaf[2] == after and comes_before(member, leaf[1]))
    if is_after and #page < 2 * wanted then page[#page + 1], page[#page + 2] = leaf[1], exact(leaf[2]) end
  end
  return #sorted, page, scales
end

-- Append to the reply the row of one flow queue in a band, if requests wait in that flow queue.
function view.add_flow_queue(reply, band, flow_queue)
  for throttled = 0, 1 do
    local tag, scales = nil, nil
    if settings.tenants then
      local sorted
      sorted, scales = view.leaves(band, throttled)
      for _, leaf in ipairs(sorted) do
        if leaf[1] == flow_queue then tag = exact(leaf[2]) end
      end
    else
      tag = read('ZSCORE', view.flow_queues(band, throttled), flow_queue)
    end
    if tag then view.add_flow_queues(reply, band, throttled, {flow_queue, tag}, scales) end
  end
end

local function score_parts(r)
  if settings.ordering ~= ORDERING_WORKLOAD_AWARE then return '', '', '' end
  local waited = (now_us - r.arrived) / 1000
  if settings.wait_signal == WAIT_SIGNAL_WORKLOAD_AVERAGE and r.workload ~= '' then
    waited = workloads.wait_ms_of(r)
  end
  return exact(settings.wait_weight * math.min(waited / settings.wait_cap_ms, 1)),
    exact(settings.criticality_weight * r.criticality / 5),
    exact(-settings.rate_weight * math.min(workloads.rate_of(r) / settings.rate_cap, 1))
end

function view.request(r, is_overdue)
  local wait, criticality, rate = score_parts(r)
  return string.format(REQUEST_ROW, r.id, r.state, r.owner, r.flow, PRIORITY[r.band], r.workload, r.model,
    r.criticality, r.cost, r.arrived, r.deadline_ms, queue.due_ms(r), is_overdue and 1 or 0,
    r.state == STATE_PLACED and r.endpoints or '',
    r.limit, wait, criticality, rate, r.prefillers)
end

function view.workload(id, text)
  local w = parse_workload(id, text)
  return string.format(WORKLOAD_ROW, id, w[1], w[2], w[3], w[4], w[5], workloads.rate(id))
end

-- Return a page of flow queues: first the ordered flow queues of each band by start tag, then the throttled flow queues
-- of each band by start tag.
--
-- args[1] 1 to begin with throttled flow queues, else 0   args[2] the priority of the band to begin with
-- args[3] start tag and args[4] name of the flow queue after which to begin; '' and '': at the band's first
-- args[5] rows wanted   args[6] the priority of the only band wanted; '': all
-- Returns {now_us, {throttled, priority, number of flow queues ... of each band}, flow queue row...}
local function view_flows(args)
  local first_throttled, first_priority = tonumber(args[1]), tonumber(args[2])
  local wanted, only = view.rows_wanted(args[5]), tonumber(args[6])
  local totals = {}
  local reply = {exact(now_us), totals}
  for throttled = 0, 1 do
    for _, band in ipairs(BANDS) do
      local priority, sorted = PRIORITY[band], view.flow_queues(band, throttled)
      local total = read('ZCARD', sorted)
      local is_first = throttled == first_throttled and priority == first_priority
      local leaves, scales
      if settings.tenants and total > 0 then
        local score, member = is_first and args[3] or '', is_first and args[4] or ''
        total, leaves, scales = view.page_of_leaves(band, throttled, score, member, math.max(wanted, 0))
      end
      totals[#totals + 1], totals[#totals + 2], totals[#totals + 3] = throttled, priority, total
      local is_behind = throttled > first_throttled or (throttled == first_throttled and priority < first_priority)
      if (is_first or is_behind) and wanted > 0 and total > 0 and (not only or only == priority) then
        local flow_queues = leaves
        if not leaves then
          local from = is_first and view.rank_behind(sorted, args[3], args[4]) or 0
          flow_queues = read('ZRANGE', sorted, from, from + wanted - 1, 'WITHSCORES')
        end
        view.add_flow_queues(reply, band, throttled, flow_queues, scales)
        wanted = wanted - #flow_queues / 2
      end
    end
  end
  return reply
end

-- Return the settings and balances of tenants' nodes.
--
-- args    the nodes' paths, at most VIEW_LIMIT
-- Returns {now_us, {path, source of the settings (1 an operator, 0 the configuration, '' none), path of the settings,
--   the settings (JSON), cost served ('' not counted), wait, then for each limit unit, per, amount, burst, left,
--   reset_ms}...}. wait: '' if the node is not throttled; else the ms until its requests may start, 0 if
--   a running request must end first. reset_ms: until the whole limit is free, or its period ends
local function view_tenants(args)
  local waits, members = {}, {}
  for _, path in ipairs(args) do
    members[#members + 1], members[#members + 2] = path, path .. tenants.INNER
  end
  for _, band in ipairs(BANDS) do
    for i, tag in ipairs(#members > 0 and read('ZMSCORE', key.throttled[band], unpack(members)) or {}) do
      if tag then
        local at_ms = read('ZSCORE', key.budget_waits, joined(band, members[i]))
        waits[math.ceil(i / 2)] = at_ms and exact(math.max(1, at_ms - now_ms)) or '0'
      end
    end
  end
  local reply = {exact(now_us)}
  for i = 1, math.min(#args, VIEW_LIMIT) do reply[i + 1] = quotas.describe(args[i], waits[i] or '') end
  return reply
end

-- Return the rows of one flow queue, a row for each band in which requests of the flow queue wait.
--
-- args[1] the flow queue
-- Returns {now_us, flow queue row...}
local function view_flow(args)
  local reply = {exact(now_us)}
  for _, band in ipairs(BANDS) do view.add_flow_queue(reply, band, args[1]) end
  return reply
end

-- Return the waiting requests at given ranks of their flow queues.
--
-- args    for each range of ranks VIEW_STRETCH arguments: priority of the band, flow queue, first rank, last rank
-- Returns {now_us, {request rows of each range}...}
local VIEW_STRETCH = 4
local function view_queue(args)
  local ids, counts = {}, {}
  for at = 1, #args, VIEW_STRETCH do
    local band = bands.find(tonumber(args[at]))
    local first, last = tonumber(args[at + 2]), tonumber(args[at + 3])
    local found = band and first <= last and read('ZRANGE', key.queue[band][args[at + 1]], first, last) or {}
    counts[#counts + 1] = 0
    for i = 1, math.min(#found, VIEW_LIMIT - #ids) do
      ids[#ids + 1] = found[i]
      counts[#counts] = i
    end
  end
  record.prefetch(ids, #ids)
  local overdue = pool.overdue > 0 and #ids > 0 and read('ZMSCORE', key.overdue, unpack(ids)) or {}
  local reply, at = {exact(now_us)}, 0
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

-- Return a page of the requests in flight, ordered by the end of their leases, the earliest first.
--
-- args[1] end of the lease (ms) and args[2] id of the request after which to begin; '' and '': at the first
-- args[3] rows wanted
-- Returns {now_us, in flight, request row (only the id if it has no record), end of its lease (ms)...}
local function view_inflight(args)
  local from = view.rank_behind(key.inflight, args[1], args[2])
  local found = read('ZRANGE', key.inflight, from, from + view.rows_wanted(args[3]) - 1, 'WITHSCORES')
  local ids = {}
  for i = 1, #found, 2 do ids[#ids + 1] = found[i] end
  record.prefetch(ids, #ids)
  local reply = {exact(now_us), read('ZCARD', key.inflight)}
  for i = 1, #found, 2 do
    local r = record.read(found[i])
    reply[#reply + 1] = r and view.request(r) or found[i]
    reply[#reply + 1] = found[i + 1]
  end
  return reply
end

-- Return the record of one request, and its position in the queue.
--
-- args[1] request id
-- Returns {now_us} if the request is unknown, else {now_us, request row, rank in its flow queue, row of its flow queue,
--   end of its lease (ms)}; '' for a part that does not apply
local function view_request(args)
  local id = args[1]
  local r = record.read(id)
  if not r then return {exact(now_us)} end
  local overdue = read('ZSCORE', key.overdue, id)
  local rank, queue_rows = '', {}
  if r.state == STATE_QUEUED then
    local flow_queue = queue.current_flow_queue(r)
    rank = read('ZRANK', key.queue[r.band][flow_queue], id) or ''
    if rank ~= '' then view.add_flow_queue(queue_rows, r.band, flow_queue) end
  end
  return {exact(now_us), view.request(r, overdue), rank, queue_rows[1] or '',
    read('ZSCORE', key.inflight, id) or ''}
end

-- Return a page of the registry's workloads, in no particular order.
--
-- args[1] cursor ('0' to begin)   args[2] rows wanted; a page may have a few more
-- Returns {now_us, number of workloads, next cursor ('0': this is the last page), workload row...}
local function view_workloads(args)
  local scan = read('HSCAN', key.workloads, args[1], 'COUNT', view.rows_wanted(args[2]))
  local reply = {exact(now_us), read('HLEN', key.workloads), scan[1]}
  for i = 1, #scan[2], 2 do reply[#reply + 1] = view.workload(scan[2][i], scan[2][i + 1]) end
  return reply
end

-- Return the row of one workload of the registry.
--
-- args[1] workload id
-- Returns {now_us, workload row}; {now_us} if the registry lacks it
local function view_workload(args)
  local text = read('HGET', key.workloads, args[1])
  return {exact(now_us), text and view.workload(args[1], text) or nil}
end

-- Return the known replicas, live or silent, with their replica info; the replica with the latest heartbeat is first.
--
-- args[1] number of replicas wanted
-- Returns {now_us, replica, last heartbeat (ms), replica info (JSON)...}
local function view_replicas(args)
  local found = read('ZREVRANGE', key.replicas, 0, tonumber(args[1]) - 1, 'WITHSCORES')
  local reply = {exact(now_us)}
  for i = 1, #found, 2 do
    reply[#reply + 1] = found[i]
    reply[#reply + 1] = found[i + 1]
    reply[#reply + 1] = read('HGET', key.replica_info, found[i]) or '{}'
  end
  return reply
end
