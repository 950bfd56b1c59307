-- include: pool record log
-- The queue: bands, in each band flows ordered by start tag, in each flow requests in arrival order.
-- Start-time fair queueing (Goyal, Vin, Cheng, 1996; several servers: Jin, Chase, Kaur, SFQ(D), 2004):
-- a flow that becomes backlogged starts at S = max(v, F); serving it sets v = S and F = S + cost/weight.
-- One tag a flow: a request that leaves early leaves no hole.
local queue = {}
local BANDS = {0, 1, 2}
local function grow(r, change)
  pool.add('queued', change)
  pool.add('queued:' .. r.band, change)
end
function queue.vtime(band) return tonumber(redis.call('HGET', key.pool, 'vtime:' .. band) or 0) end
-- Put r in (back) at its place. Its record is written by the caller.
function queue.insert(r)
  local requests = key.queue(r.band, r.flow)
  redis.call('ZADD', requests, r.arrived, r.id)
  redis.call('ZADD', key.deadlines, r.deadline_ms, r.id)
  grow(r, 1)
  if redis.call('ZCARD', requests) == 1 then
    local finish = tonumber(redis.call('ZSCORE', key.finish(r.band), r.flow) or 0)
    redis.call('ZADD', key.flows(r.band), math.max(queue.vtime(r.band), finish), r.flow)
  end
end
-- Take r out of its flow without serving it; an emptied flow keeps its tag as its finish tag.
function queue.remove(r)
  local requests = key.queue(r.band, r.flow)
  if redis.call('ZREM', requests, r.id) == 0 then return end
  redis.call('ZREM', key.deadlines, r.id)
  grow(r, -1)
  if redis.call('EXISTS', requests) == 0 then
    redis.call('ZADD', key.finish(r.band), redis.call('ZSCORE', key.flows(r.band), r.flow), r.flow)
    redis.call('ZREM', key.flows(r.band), r.flow)
  end
end
-- The id that is served next and its flow's start tag, or nil: the first band that has one, its least tag.
function queue.head()
  for _, band in ipairs(BANDS) do
    local flow = redis.call('ZRANGE', key.flows(band), 0, 0, 'WITHSCORES')
    if flow[1] then
      return redis.call('ZRANGE', key.queue(band, flow[1]), 0, 0)[1], tonumber(flow[2])
    end
  end
end
-- Charge r to its flow and take it out: v moves to the flow's start tag, the flow to its next.
function queue.serve(r, tag)
  local requests, finish = key.queue(r.band, r.flow), tag + r.cost / r.weight
  redis.call('ZREM', requests, r.id)
  redis.call('ZREM', key.deadlines, r.id)
  redis.call('HSET', key.pool, 'vtime:' .. r.band, tag)
  grow(r, -1)
  if redis.call('EXISTS', requests) == 1 then
    redis.call('ZADD', key.flows(r.band), finish, r.flow)
  else
    redis.call('ZREM', key.flows(r.band), r.flow)
    redis.call('ZADD', key.finish(r.band), finish, r.flow)
  end
end
-- Keep a silent replica's request for whoever brings its id, out of the order until then. Its own deadline
-- stays in its record: whoever adopts it has the rest of its TTL.
function queue.hold(r, until_ms)
  queue.remove(r)
  r.state = 'held'
  redis.call('ZADD', key.deadlines, math.min(r.deadline_ms, until_ms), r.id)
  record.write(r)
  log('held', r)
end
