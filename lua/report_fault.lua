-- include: outliers
-- Record that requests have failed on endpoints, or that endpoints are full. Count each failed request on its next
-- endpoint, which Envoy tries, then dispatch queued requests.
--
-- Guarantees: a failure counts once, however many replicas report it and how often. Failures of one flow do not eject
-- an endpoint while other flows have requests in flight. In a request's record, the call changes only the endpoints.
-- A request that an endpoint refuses (status 429 or 503) counts in the pool's field `endpoint_refusals`.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then for each failure: request id, endpoint, flow ('' unknown: the failure counts only
--   if the request is placed there), why (`full`: the endpoint takes no more requests for now; `connect`: a connection
--   to the endpoint failed; `retried`: another endpoint has served the request; else the reason of the failure), for
--   how long the endpoint is full, ms (0: unknown)
-- Returns {epoch, notifications, attempts, served, reply...}: 'ejected' or 'down' (by this failure) | 'noted' |
--   'unknown'

-- Count a request that the endpoint has refused. Two reports may name the refusal, and only one counts: Envoy's log
-- entry about the attempt if another attempt follows, else the report of the request's end, which names the flow.
local function count_refusal(address)
  local known, counts = pcall(cjson.decode, read('HGET', key.pool, 'endpoint_refusals') or '{}')
  if not known or type(counts) ~= 'table' then counts = {} end
  if not counts[address] then
    for each in pairs(counts) do
      if read('HEXISTS', key.endpoints, each) == 0 then counts[each] = nil end
    end
  end
  counts[address] = (tonumber(counts[address]) or 0) + 1
  defer_write('HSET', key.pool, 'endpoint_refusals', cjson.encode(counts))
end

local function report_fault(args)
  record.prefetch(column(args, ITEM.report_fault, 1))
  return for_each_item(args, ITEM.report_fault, function(_, id, address, flow, why, hold_ms)
    local r = record.read(id)
    if r and r.state ~= STATE_PLACED then r = nil end
    local is_here = r and endpoints.first(r.endpoints) == address
    -- Here the failure was reported before, or the request has ended, or the report is forged: it counts nothing.
    if not is_here and (flow == '' or why == 'retried') then return 'unknown' end
    local following = is_here and string.match(r.endpoints, '^[^,]*,(.+)$')
    if (why == 'full' or why == '503') and is_here and (following or flow ~= '') then count_refusal(address) end
    if following then move_placed(r, endpoints.first(following), following) end
    local mine = is_here and not following and 1 or 0
    if why == 'full' then
      outliers.full(address, mine, tonumber(hold_ms) or 0)
    elseif why == 'connect' then
      return is_here and endpoints.is_ready(address) and marks.set('down', true, address) and 'down' or 'noted'
    elseif outliers.failed(address, id, r and r.flow or flow, why, mine) then
      return 'ejected'
    end
    return 'noted'
  end)
end
