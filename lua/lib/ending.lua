-- include: queue endpoints news
-- The end of a request, whatever state it is in: everything it holds is given back, exactly once.
local function release(r)
  local list, limited = r.endpoints, r.limit > 0
  later('ZREM', key.inflight, r.id)
  pool.release(r.taken)
  if r.state == 'placed' then
    local endpoint = firsts[list] or endpoints.first(list)
    endpoints.release(endpoint)
    if limited then endpoints.count_flow(r, endpoint, -1) end
  else
    news.forget(r.owner, r.id)
  end
  if limited then endpoints.count_flow(r, nil, -1) end
end
local function finish_request(r, event, note_text)
  local state = r.state
  local ran = state == 'granted' or state == 'placed'
  if state == 'queued' then
    queue.remove(r)
  elseif state == 'held' then
    timers.stop(r.id)
  else
    release(r)
  end
  record.drop(r)
  workloads.ended(r.workload)
  pool.ended = pool.ended + 1
  if settings.log_max > 0 then log(event, r, nil, nil, note_text) end
  if state == 'placed' and settings.caps then
    local endpoint = endpoints.first(r.endpoints)
    if endpoints.has_place(endpoint) then queue.unblock(endpoint) end
  end
  if ran and r.limit > 0 then
    for _, band in ipairs(BANDS) do queue.unpark(band, queue.lane(r)) end
  end
end
-- End a queued request that did not ask for it, and tell its owner: 'expired', 'preempted' or 'evicted'. The version
-- before knows 'evicted' for both of these, and no other word may reach its replicas.
local function turn_away(r, event)
  finish_request(r, event)
  news.tell(r.owner, r.id, event == 'preempted' and pool.is_mixed() and 'evicted' or event)
end
