-- include: dispatch
-- Choose and reserve an endpoint for each granted request of a batch.
--
-- Guarantees: load is read and reserved in one step, so two replicas never both take an endpoint for
-- idle; repeating a call returns the same endpoint (G6).
--
-- KEYS[1] epp:{POOL}:pool
-- ARGV[1] the calling replica; then for each request: id, attempt, candidates ('*' or 'a,b,c')
-- Returns {born, news, attempts, served, reply...}, one reply a request:
--   'placed a,b,c' | 'refused no-endpoints' (and ended) | 'gone' (no grant of this owner)
local ITEM = 3
news.caller = ARGV[1]
local replies = {}
for at = 2, #ARGV, ITEM do
  local id, attempt, candidates = unpack(ARGV, at, at + ITEM - 1)
  local r, reply = record.read(id), 'gone'
  if r and r.owner == news.caller and r.attempt == attempt then
    if r.state == 'placed' then
      reply = 'placed ' .. r.endpoints
    elseif r.state == 'granted' then
      local picked = endpoints.pick(candidates, now_us + at)
      if picked then
        redis.call('HDEL', key.inbox(r.owner), id)
        r.endpoints, r.state = picked, 'placed'
        endpoints.reserve(endpoints.first(picked))
        redis.call('ZADD', key.inflight, now_ms + pool.lease_ms, id)
        record.write(r)
        log('placed', r)
        reply = 'placed ' .. picked
      else
        finish_request(r, 'refused')
        reply = 'refused no-endpoints'
      end
    end
  end
  replies[#replies + 1] = reply
end
local born, mine, attempts, served = conclude()
return {born, mine, attempts, served, unpack(replies)}
