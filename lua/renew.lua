-- include: dispatch
-- Renew the leases of running requests. If a request's record was lost (by FLUSHALL, or because its lease ended while
-- no replica could report), restore the request to the stock from its accounting token.
--
-- Guarantees: a renewed request is not reclaimed, and is counted on the endpoint that serves it. An ended request is
-- not restored while its tombstone lasts; a later request with the same id is restored if the caller admitted it. A
-- token takes no more of the pool's stock than an admission does, and restores a request only on an endpoint that the
-- pool knows (G1). A token from an access log proves less, since a client may have copied it: such a token restores a
-- request only (1) while the pool may lack records (pool.may_lack_records), (2) if the request was reclaimed without a
-- report of its end, or (3) if the request was admitted without Redis, less than the length of a lease and 10 s ago.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then for each request: id, attempt ('' when an access log reports it), serving
--   endpoint ('' unknown), accounting token ('' none), how long ago it was last seen alive, ms. The token, joined by
--   tabs: flow, band, weight, cost, workload, criticality, model, endpoint, limit; alone=MS, the time of an admission
--   without Redis, by the pool's clock; priority=N, the priority of a dynamic band, with the nearest named band in
--   `band`. Only replicas use the further fields of a token.
--
-- Returns {epoch, notifications, attempts, served, reply...}:
--   'renewed' | 'restored' | 'waiting' (queued: not yet in flight) | 'unknown' (and not restored)

local MOST = 1e12 -- largest weight or cost in a token: sums of numbers up to this size stay exact
local HIGHEST_LIMIT = 65535

-- Return the number of the band that a token's fields name; nil if the token's band or priority is invalid.
local function band_of(fields)
  local band, priority = tonumber(fields.band), fields.priority
  if priority then
    local is_valid = priority >= LEAST_PRIORITY and priority <= MOST_PRIORITY
    return is_valid and bands.of(priority) or nil
  end
  return band and band % 1 == 0 and band >= 0 and band <= LAST_NAMED and band or nil
end

-- Parse a number from 0 to `most`. Return nil for any other text, since an access log may contain anything.
local function number_up_to(text, most)
  local number = tonumber(text)
  return number and number >= 0 and number <= most and number or nil
end

local function is_address(text) return string.find(text, '^[^,%c]+$') end

-- Return whether the pool may lack the record of a running request. `alone_ms` is the time when the request was
-- admitted without Redis, else nil.
local function may_lack(id, alone_ms)
  return pool.may_lack_records() or tombstones.was_given_up(id)
    or (alone_ms and now_ms - alone_ms < settings.lease_ms + LONGER_MS)
end

local function restore(id, attempt, served, token, ago_ms)
  if string.find(token, '%z') then return 'unknown' end -- byte 0 would end a packed text early
  local fields = parse_accounting_token(token)
  if not (pool.known and fields and (attempt ~= '' or may_lack(id, fields.alone_ms))) then return 'unknown' end
  local weight = number_up_to(fields.weight, MOST)
  local cost = number_up_to(fields.cost, MOST)
  cost = cost and bands.clamp_cost(cost)
  local criticality, limit = number_up_to(fields.criticality, 5), number_up_to(fields.limit, HIGHEST_LIMIT)
  local endpoint = is_address(served) and endpoints.is_known(served) and served or fields.endpoint
  if not (weight and cost and criticality and limit and limit % 1 == 0
    and is_address(endpoint) and endpoints.is_known(endpoint)) then
    return 'unknown'
  end
  if tombstones.covers(id, attempt ~= '' and now_ms - tonumber(ago_ms)) then return 'unknown' end
  local band = band_of(fields)
  if not band then return 'unknown' end
  local r = record.new(id)
  r.state, r.owner, r.attempt, r.flow, r.workload, r.model = STATE_PLACED, notifications.caller, attempt, fields.flow,
    fields.workload, fields.model
  r.band, r.weight, r.cost, r.criticality, r.limit, r.endpoints = band, weight, cost, criticality, limit, endpoint
  r.taken = pool.stock_for(cost, marks.largest_bound())
  r.arrived, r.deadline_ms, r.tag, r.bytes = now_us, record.NO_DEADLINE, -1, 0
  restore_placed(r)
  return 'restored'
end

-- If Envoy has used a fallback endpoint, count the request on the endpoint that serves the request.
local function move(r, served)
  if is_address(served) and served ~= endpoints.first(r.endpoints) then move_placed(r, served, served) end
end

local function renew(args)
  record.prefetch(column(args, ITEM.renew, 1))
  return for_each_item(args, ITEM.renew, function(_, id, attempt, served, token, ago_ms)
    local r = record.read(id)
    if not r then return restore(id, attempt, served, token, ago_ms) end
    if record.is_waiting(r) then return 'waiting' end
    defer_write('ZADD', key.inflight, now_ms + settings.lease_ms, id)
    if r.state == STATE_PLACED then move(r, served) end
    return 'renewed'
  end)
end
