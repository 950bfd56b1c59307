-- include: builtins
-- Every key of the pool, derived from the one declared: keys[1] = epp:{POOL}:pool. All carry the hash
-- tag {POOL}, so a Cluster keeps them in one slot and each call is legal there. B is a band (0 to 2), L a
-- lane: what a band orders, the flow's name or, under `fairness: none`, '' for the whole band. Two names in one
-- key or field are joined by byte 31, which no name can hold (picker_fleet/units.py): by any other, two pairs of names
-- could spell the same key.
--
-- key          type    what it holds                                             removed by
-- pool         hash    counters (packed, lib/pool.lua), settings, versions       nobody (FLUSHALL)
-- requests     hash    request id -> record (lib/record.lua)                     the request's end
-- inflight     zset    granted or placed request id -> lease expiry, ms          the request's end
-- timers       zset    queued or held id -> when its next thing is due, ms       dispatch, the request's end
-- overdue      zset    queued id -> when it became overdue, us                   dispatch, the request's end
-- queue:B:L    zset    queued ids of a lane -> arrival, us; under edf, deadline  Redis, when empty
-- line:B:L<31>W zset the ids of workload W there -> arrival (workload-aware)   Redis, when empty
-- growing:B:L  zset    heads of lines whose score grows (lib/order.lua)          Redis, when empty
-- static:B:L   zset    heads of lines whose score does not                       Redis, when empty
-- flows:B      zset    backlogged lane -> its start tag                          Redis, when empty
-- parked:B     zset    backlogged lane at its limit -> its start tag             Redis, when empty
-- blocked:B:E  zset    parked lane that waits for a place on endpoint E -> its tag its end of waiting
-- blockers     hash    B\31L of such a lane -> the endpoints that it waits for    its end of waiting
-- finish:B     zset    idle lane -> its last finish tag, while above v           sweep
-- victims:B    zset    backlogged lane -> when it was last preempted, us         Redis, when empty
-- preempted:B  zset    the same of idle lanes, under pressure                    sweep
-- limits       hash    limited flow, or flow\31endpoint -> requests in flight    the request's end
-- load         zset    endpoint -> requests in flight (+ UNPICKABLE)             publish, release
-- endpoints    hash    endpoint -> JSON {labels, draining}                       publish
-- marks        hash    drained\31endpoint or down\31endpoint -> since when, ms    undrain, probes, sweep
-- metrics      hash    endpoint -> JSON of its last scrape; and its channel      scraping (picker_fleet/scraping/)
-- lanes        string  all lanes as one replica read them for all, or its claim  Redis, when old
-- routes       stream  what was routed where, and completed (picker_fleet/scheduling/)   its own cap
-- workloads    hash    workload id -> metrics (lib/workloads.lua)                sweep, when idle
-- answers      hash    flow -> mean tokens of its answers, last use              sweep, when idle
-- replicas     zset    replica incarnation -> last heartbeat, ms                 sweep
-- about        hash    replica incarnation -> JSON it gave of itself             sweep
-- suspects     zset    placed id whose client may have gone -> since when, ms  sweep
-- buried       zset    id whose end somebody has heard -> when, ms               sweep
-- unheard      zset    id that was given up, its end unheard -> when, ms         its next sign of life, sweep
-- orphans      hash    silent replica -> cursor of the sweep's walk              sweep, heartbeat
-- inbox:R      hash    request id -> news for replica R                          place, heartbeat, sweep
-- log          stream  the decision log, when it is on                           its own cap
-- wake:R       channel the same news as a hint to replica R                      (never stored)
local BANDS = {0, 1, 2}
local key -- the keys of the pool that this call is about
local keyrings = {}
-- Texts that begin with `prefix`, by how they end. Each is put together when it is first asked for, and kept:
-- to do it at every turn costs as much as a quarter of a command. Those of a million lanes must not be kept:
-- when they are too many, all are forgotten.
local NAMES_KEPT = 1000
local function names_under(prefix)
  local kept = 0
  local function make(names, ending)
    if kept == NAMES_KEPT then
      for each in pairs(names) do names[each] = nil end
      kept = 0
    end
    local name = prefix .. ending
    names[ending], kept = name, kept + 1
    return name
  end
  return setmetatable({}, {__index = make})
end
local function joined(name, other) return name .. '\31' .. other end
local function use_keys(pool_key)
  key = keyrings[pool_key]
  if key then return end
  local base = string.sub(pool_key, 1, -5)
  key = {pool = pool_key}
  for _, name in ipairs({'requests', 'inflight', 'timers', 'overdue', 'limits', 'load', 'endpoints', 'marks',
    'metrics', 'workloads', 'answers', 'replicas', 'about', 'buried', 'unheard', 'suspects', 'orphans', 'lanes', 'log',
    'blockers'}) do
    key[name] = base .. name
  end
  for _, kind in ipairs({'flows', 'parked', 'finish', 'victims', 'preempted'}) do
    key[kind] = {}
    for _, band in ipairs(BANDS) do key[kind][band] = base .. kind .. ':' .. band end
  end
  for _, kind in ipairs({'queue', 'growing', 'static', 'blocked'}) do
    key[kind] = {}
    for _, band in ipairs(BANDS) do key[kind][band] = names_under(base .. kind .. ':' .. band .. ':') end
  end
  function key.line(band, lane, workload) return base .. 'line:' .. band .. ':' .. joined(lane, workload) end
  -- As the version before spelled it. What it has queued stands there until it is served.
  function key.former_line(band, lane, workload) return base .. 'line:' .. band .. ':' .. lane .. ':' .. workload end
  key.inbox = names_under(base .. 'inbox:')
  function key.wake(replica) return base .. 'wake:' .. replica end
  keyrings[pool_key] = key
end
