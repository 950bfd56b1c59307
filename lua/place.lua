-- include: placing dispatch
-- Choose and reserve an endpoint for each granted request of a batch.
--
-- Guarantees: load is read and reserved in one step, so two replicas never both take an endpoint for
-- idle; repeating a call returns the same endpoint (G6).
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then for each request: id, attempt, candidates ('*', 'a,b,c' or 'a=0.7,b=0.5')
-- Returns {born, news, attempts, served, reply...}, one reply a request:
--   'placed a,b,c LOADS' (requests in flight as they were: of the candidates named, '' where one could not
--   have it; for '*', of a,b,c; without LOADS if it was placed before)
--   | 'queued TTL_LEFT_MS' (back in its place: wherever it may go, a limit of its flow or the endpoint is reached)
--   | 'refused no-endpoints RETRY_AFTER_S' or 'expired' (and ended) | 'gone' (no grant of this owner)
local PLACE_ITEM = 3
local function place(args)
  record.prefetch(column(args, PLACE_ITEM, 1))
  local picks = (#args - 1) / PLACE_ITEM
  return batch(args, PLACE_ITEM, function(at, id, attempt, candidates)
    local r = known_records[id] or record.read(id)
    if not r or r.owner ~= news.caller or r.attempt ~= attempt then return 'gone' end
    if r.state == 'placed' then return 'placed ' .. r.endpoints end
    if r.state ~= 'granted' then return 'gone' end
    return place_granted(r, candidates, now_us + at, picks)
  end)
end
