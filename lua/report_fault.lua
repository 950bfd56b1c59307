-- include: outliers
-- Take note that attempts of requests have failed on endpoints, or that these are full, and move the requests to their
-- next endpoints, which Envoy tries; what now fits is dispatched.
--
-- Guarantees: an attempt counts once, whoever reports it and how often. Failures of one flow do not eject an endpoint
-- while other flows have requests in flight. Nothing of a request but its endpoint changes.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then for each attempt: request id, endpoint, flow ('' unknown: the attempt counts only
--   if the request has a record), why (`full`: the endpoint takes no more for now; `connect`: it cannot be connected
--   to; `retried`: another endpoint has served; else the reason of a failure), how long it is full, ms (0: it did not
--   say)
--
-- Returns {epoch, notifications, attempts, served, reply...}: 'ejected' | 'down' (by this one) | 'noted' |
--   'unknown'

local function report_fault(args)
  record.prefetch(column(args, ITEM.report_fault, 1))
  return for_each_item(args, ITEM.report_fault, function(_, id, address, flow, why, hold_ms)
    local r = record.read(id)
    if r and r.state ~= STATE_PLACED then r = nil end
    if not r and flow == '' then return 'unknown' end
    local is_here = r and endpoints.first(r.endpoints) == address
    if why == 'retried' and not is_here then return 'noted' end -- Envoy has told of the attempt, or it is over
    local following = is_here and string.match(r.endpoints, '^[^,]*,(.+)$')
    if following then move_placed(r, endpoints.first(following), following) end
    if why == 'full' then
      outliers.full(address, is_here and not following and 1 or 0, tonumber(hold_ms) or 0)
    elseif why == 'connect' then
      return is_here and endpoints.is_ready(address) and endpoints.mark('down', true, address) and 'down' or 'noted'
    elseif outliers.failed(address, id, r and r.flow or flow, why) then
      return 'ejected'
    end
    return 'noted'
  end)
end
