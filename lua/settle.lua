-- include: outliers
-- Account for requests that have ended, whichever replica reports the end: release stock, endpoint and lease, correct
-- the charge of the flow, and dispatch queued requests. A request that is still queued is removed, since its client has
-- gone.
--
-- Guarantees: each request is released once; an unknown or repeated id changes nothing (G6). If a metrics page showed
-- an end before its report, and the sweep reclaimed a running request instead, the report restores that request (G1).
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then for each request: id, outcome (completed; answered: completed, and its endpoint
--   answered well; client_gone; upstream_failed), its real cost ('' unknown; -N: at least N), its answer's tokens
--   ('' unknown), the size of its prompt's text ('' unless the real cost is the tokens of this text and of the answer),
--   its usage ('' unknown; else three doubles, `store.PACKED_USAGE`: prompt tokens and cached prompt tokens, both -1
--   if unknown; answer tokens, a lower bound if the prompt tokens are unknown)
--
-- Returns {epoch, notifications, attempts, served, reply...}: 'settled MODEL' | 'left MODEL' (the request was still
-- queued) | 'unknown'

local function correct_charge(r, actual)
  -- The tag -1 marks a bypassed request, whose flow was charged nothing. A queued request may have another negative
  -- tag, since a refund under one policy may exceed the charge under another policy.
  if r.tag == -1 or not actual then return end
  if actual < 0 then actual = math.max(r.cost, -actual) end
  actual = bands.clamp_cost(actual)
  if actual == r.cost or r.cost == 0 then return end -- usage does not change the cost 0
  queue.charge_band(r, actual - r.cost)
  if settings.fairness ~= FAIRNESS_WEIGHTED_FAIR then return end
  local share = queue.share(r)
  local change = (actual - r.cost) * share / r.cost
  log_event('corrected', r, queue.correct(r, queue.flow_queue(r), change, r.tag + share), nil, change)
end

-- If the sweep reclaimed a running request in place of `r`, return that request and the time of the metrics page that
-- counted one request too few; else nil. Only a page newer than r's last sign of life can lack r.
local function ghost_in_place_of(r)
  local address = endpoints.first(r.endpoints)
  local seen_ms = tonumber(read('ZSCORE', key.inflight, r.id) or 0) - settings.lease_ms
  return tombstones.find_ghost(function(page_ms, ghost)
    return page_ms > seen_ms and endpoints.first(ghost.endpoints) == address
  end)
end

local hosts, workload_ids, ending = {}, {}, {} -- kept from call to call, since creating a table is slow
local function settle(args)
  local ids, count = column(args, ITEM.settle, 1)
  record.prefetch(ids, count)
  local placed, known = 0, 0
  for i = 1, count do
    local r = record.read(ids[i])
    if r then
      if r.state == STATE_PLACED then
        placed = placed + 1
        hosts[placed] = endpoints.first(r.endpoints)
      end
      known = known + 1
      workload_ids[known], ending[known] = r.workload, r
    end
  end
  endpoints.prefetch(hosts, placed)
  workloads.prefetch(workload_ids, known)
  if settings.tenants then quotas.prefetch(ending, known) end
  local has_ghosts = tombstones.has_ghosts()
  return for_each_item(args, ITEM.settle, function(_, id, outcome, actual, answer_tokens, prompt_size, used)
    local r = record.read(id)
    if has_ghosts then tombstones.forget_ghost(id) end
    if not r then return 'unknown' end
    if record.is_waiting(r) then
      finish_request(r, 'cancelled')
      return 'left ' .. r.model
    end
    if actual ~= '' then correct_charge(r, tonumber(actual)) end
    if answer_tokens ~= '' then usage.learn_answer(r.flow, r.model, tonumber(answer_tokens)) end
    if prompt_size ~= '' then
      usage.learn_prompt(r.model, tonumber(prompt_size), tonumber(actual) - tonumber(answer_tokens))
    end
    if outcome == 'answered' then
      outcome = 'completed'
      if pool.outliers > 0 and r.state == STATE_PLACED then
        outliers.answered(endpoints.first(r.endpoints), r.flow)
      end
    end
    if settings.tenants and used ~= '' then
      quotas.used(r, struct.unpack('<ddd', used))
    end
    local ghost, page_ms
    if has_ghosts and r.state == STATE_PLACED then ghost, page_ms = ghost_in_place_of(r) end
    finish_request(r, outcome)
    -- The restored request may have ended, too; the report of its end must then restore the next request that the sweep
    -- reclaimed by mistake. So the restoration is no sign of life: the request's lease begins at the metrics page,
    -- except that at least half of the lease is left.
    if ghost then
      local seen_ms = math.max(page_ms - 1, now_ms - settings.lease_ms / 2)
      restore_placed(ghost, seen_ms + settings.lease_ms)
    end
    return 'settled ' .. r.model
  end)
end
