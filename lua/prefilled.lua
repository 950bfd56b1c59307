-- include: dispatch
-- A replica reports that the first tokens of split requests have come: release these requests' slots on their prefill
-- endpoints, then dispatch queued requests.
--
-- Guarantees: a reservation is released once. An unknown request, a request without a reservation, and a repeated call
-- change nothing (G6).
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then for each request: id
--
-- Returns {epoch, notifications, attempts, served, reply...}: 'released' | 'unknown'

local function prefilled(args)
  record.prefetch(column(args, ITEM.prefilled, 1))
  return for_each_item(args, ITEM.prefilled, function(_, id)
    local r = record.read(id)
    if not r or r.state ~= STATE_PLACED or r.prefillers == '' then return 'unknown' end
    stages.end_prefill(r, '')
    return 'released'
  end)
end
