-- Every key of the pool, derived from the one declared: KEYS[1] = epp:{POOL}:pool. All carry the hash
-- tag {POOL}, so a Cluster keeps them in one slot and each script is legal there.
--
-- key         type    what it holds                                             removed by
-- pool        hash    stock, queue length, bounds, virtual times, capacities    nobody (FLUSHALL)
-- requests    hash    request id -> record (lib/record.lua)                     the request's end
-- inflight    zset    granted or placed request id -> lease expiry, ms          the request's end
-- deadlines   zset    queued or held id -> end of its TTL or of its hold, ms    dispatch, the request's end
-- queue:B:F   zset    queued ids of flow F in band B -> arrival sequence        Redis, when empty
-- flows:B     zset    backlogged flow -> its start tag                          Redis, when empty
-- finish:B    zset    idle flow -> its last finish tag, while above v           sweep
-- load        zset    endpoint -> requests in flight (+ UNPICKABLE)             publish, release
-- endpoints   hash    endpoint -> JSON {labels, draining}                       publish
-- workloads   hash    workload id -> metrics (lib/workloads.lua)                sweep, when idle
-- replicas    zset    replica incarnation -> last heartbeat, ms                 sweep
-- about       hash    replica incarnation -> JSON it gave of itself             sweep
-- orphans     hash    silent replica -> how far the sweep has walked            sweep, heartbeat
-- inbox:R     hash    request id -> news for replica R: granted, expired        place, heartbeat, sweep
-- log         stream  the decision log, when it is on                           its own cap
-- wake:R      channel the same news as a hint to replica R                      (never stored)
local base = string.sub(KEYS[1], 1, -5)
local key = {
  pool = KEYS[1],
  requests = base .. 'requests',
  inflight = base .. 'inflight',
  deadlines = base .. 'deadlines',
  load = base .. 'load',
  endpoints = base .. 'endpoints',
  workloads = base .. 'workloads',
  replicas = base .. 'replicas',
  about = base .. 'about',
  orphans = base .. 'orphans',
  log = base .. 'log',
}
function key.queue(band, flow) return base .. 'queue:' .. band .. ':' .. flow end
function key.flows(band) return base .. 'flows:' .. band end
function key.finish(band) return base .. 'finish:' .. band end
function key.inbox(replica) return base .. 'inbox:' .. replica end
function key.wake(replica) return base .. 'wake:' .. replica end
