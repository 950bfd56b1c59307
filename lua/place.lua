-- include: dispatch
-- Choose and reserve an endpoint for each granted request of a batch, and a prefill endpoint for each request to split.
-- If the grant has already placed a request, the request keeps its endpoint; it moves only if the endpoint has stopped
-- taking new requests since, and another endpoint can take it.
--
-- Guarantees: one step reads an endpoint's load and reserves the endpoint, so two replicas never both take the same
-- idle endpoint (G1), in either stage.
-- Repeating a call returns the same endpoint (G6). Each placement begins a full lease: the caller may have been
-- suspended since the grant, and the sweep must not reclaim a request that starts now.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then for each request: id, attempt, candidates ('*', 'a,b,c' or 'a=0.7,b=0.5'), prefill
--   (candidates for its prefill in the same form or, by decode endpoint, 'd,e>x=0.7,y=0.5;f>y=0.7'; '': do not split
--   the request)
--
-- Returns {epoch, notifications, attempts, served, reply...}, one reply per request:
--   'placed a,b,c LOADS' (LOADS: requests in flight before the choice, of each named candidate, '' if not eligible; for
--     '*', of a, b and c; missing if the request was placed before). A split request: 'placed a,b,c>x,y LOADS': x has
--     the reservation, y is a fallback. If no prefill endpoint is ready, the request is not split
--   | 'queued TTL_LEFT_MS' (back in the queue: each candidate of a stage has reached its own limit or the flow's limit)
--   | 'refused no-endpoints RETRY_AFTER_S' or 'expired' (both end the request) | 'gone' (the caller has no such grant)

local function place(args)
  record.prefetch(column(args, ITEM.place, 1))
  local picks = (#args - 1) / ITEM.place
  return for_each_item(args, ITEM.place, function(at, id, attempt, candidates, split)
    local r = record.read(id)
    if not r or r.owner ~= notifications.caller or r.attempt ~= attempt then return 'gone' end
    local turn = now_us + at
    if record.is_waiting(r) then return 'gone' end
    defer_write('ZADD', key.inflight, now_ms + settings.lease_ms, id)
    if r.state == STATE_GRANTED then return place_granted(r, candidates, split, turn, picks) end
    local former = r.endpoints
    local moved = not endpoints.is_ready(endpoints.first(former)) and notifications.is_untaken(r)
      and place_request(r, candidates, '', turn, picks)
    notifications.withdraw(r.owner, id)
    if not moved then return stages.placed(r) end
    leave_endpoint(r, former)
    log_event('moved', r)
    return moved
  end)
end
