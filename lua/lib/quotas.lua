-- include: tenants
-- Charges requests to the limits of tenants, and tells which requests must wait. A limit of `amount` units per `per_ms`
-- is a leaky bucket (ITU-T I.371, continuous-state leaky bucket): `owed` units leak at amount / per_ms, and a request
-- that takes c units may start while owed + c <= `burst`. Requests are charged by estimate and corrected by usage, so
-- `owed` may pass `burst`. A budget counts the units spent in a calendar period; `max_parallel` limits the requests in
-- flight. The hash `balances` has each limit's used amount; a request's record has its charges. Uses nodes from
-- lib/tenants.lua, reads and writes from lib/storage.lua, the clock and settings from lib/pool.lua. Defines `quotas`.
local quotas = {}
do -- a block of its own: Lua allows 200 local variables in a chunk
  local INNER = tenants.INNER

  -- The field `owed` of a limit (lib/tenants.lua) is its used amount: the level of a leaky bucket, the units spent in a
  -- budget's period, or the requests in flight; for a `served` count, the cost served. A script call reads and writes
  -- each amount once. Amounts stay cached between calls while no other library changes the pool: `stored` is the amount
  -- last written to Redis, `stored_ms` the time of the write; a budget's cached amount is valid until `ends_ms`.
  local calls = 0 -- the number of script calls so far, which numbers the present call
  local decode -- function: (limit, stored text) -> used amount

  local READ_AT_ONCE = 1000 -- most values for one unpack(), which puts them on a stack of limited depth
  local wanted, asked = {}, {} -- reused by each call: limits whose amount must be read, and their fields in `balances`
  local function want(found, count)
    found.read_in = calls
    local at_ms = now_us / 1000
    for i = 1, #found.nodes do
      local node = found.nodes[i]
      if node.read_in ~= calls then
        node.read_in = calls
        for j = 1, #node do
          local limit = node[j]
          local owed, rate = limit.stored, limit.rate
          if owed and rate then
            owed = owed - (at_ms - limit.stored_ms) * rate
            limit.owed = owed > 0 and owed or 0
          elseif owed and not (limit.ends_ms and now_ms >= limit.ends_ms) then
            limit.owed = owed
          else
            count = count + 1
            asked[count], wanted[count] = limit.field, limit
          end
        end
      end
    end
    return count
  end

  local function read_wanted(count)
    for first = 1, count, READ_AT_ONCE do
      local last = math.min(first + READ_AT_ONCE - 1, count)
      local texts = read('HMGET', key.balances, unpack(asked, first, last))
      for i = first, last do wanted[i].owed = decode(wanted[i], texts[i - first + 1]) end
    end
  end

  -- Read the balances of the tenant nodes on a flow's path, at most once in a script call.
  local function prefetch(found)
    if found.read_in ~= calls then read_wanted(want(found, 0)) end
  end

  -- Read the balances of the nodes of the first `count` requests in `requests`, with one Redis command.
  function quotas.prefetch(requests, count)
    local fields, counting = 0, tenants.counting
    for i = 1, count do
      local found = counting[requests[i].flow]
      if found.read_in ~= calls then fields = want(found, fields) end
    end
    read_wanted(fields)
  end

  -- The calendar periods of budgets, by the pool's clock in UTC: return the number of the present period, and the ms
  -- until its end.
  local DAY_MS = 86400000
  -- Return the number of days since 1970-01-01 of the first day of a month; months are counted from January of year 0
  -- (Hinnant, "chrono-Compatible Low-Level Date Algorithms").
  local function first_day(months)
    local year, month = math.floor(months / 12), months % 12 + 1
    if month <= 2 then year = year - 1 end
    local era = math.floor(year / 400)
    local of_era = year - era * 400
    local day = math.floor((153 * ((month + 9) % 12) + 2) / 5)
    return era * 146097 + of_era * 365 + math.floor(of_era / 4) - math.floor(of_era / 100) + day - 719468
  end

  -- A count of requests in flight (`name` 0) has `settings.tenancy` as its period, so a new `tenancy` voids the count.
  local function period_of(name)
    if name == 0 then return settings.tenancy or 1, math.huge end
    local days = math.floor(now_ms / DAY_MS)
    if name == 'day' then return days, (days + 1) * DAY_MS - now_ms end
    if name == 'week' then -- a week begins on Monday; 1970-01-01 was a Thursday
      local week = math.floor((days + 3) / 7)
      return week, ((week + 1) * 7 - 3) * DAY_MS - now_ms
    end
    local months = 1970 * 12 + math.floor(days / 30.436875)
    while first_day(months + 1) <= days do months = months + 1 end
    while first_day(months) > days do months = months - 1 end
    return months, first_day(months + 1) * DAY_MS - now_ms
  end

  local function ms_left(name)
    local _, left_ms = period_of(name)
    return left_ms
  end

  function decode(limit, text)
    if not text then return 0 end
    if limit.rate then
      local valid, owed, at_ms = pcall(struct.unpack, 'dd', text)
      if not valid then return 0 end
      local passed_ms = now_us / 1000 - at_ms
      if passed_ms > 0 then owed = owed - passed_ms * limit.rate end
      return owed > 0 and owed or 0
    end
    if limit.unit == 'served' then return tonumber(text) or 0 end
    local period, spent = string.match(text, '^(%d+) (%S+)$')
    return tonumber(period) == period_of(limit.per) and tonumber(spent) or 0
  end

  local function encode(limit)
    if limit.rate then return struct.pack('dd', limit.owed, now_us / 1000) end
    if limit.unit == 'served' then return exact(limit.owed) end
    if not limit.ends_ms or now_ms >= limit.ends_ms then
      local period, left_ms = period_of(limit.per)
      limit.period, limit.ends_ms = period, now_ms + left_ms
    end
    return limit.period .. ' ' .. exact(limit.owed)
  end

  -- Collect the nodes whose next request may start now: this call refunds or changes their limits, or ends a waiting
  -- request.
  local eased, eased_count = {}, 0
  function quotas.ease(node)
    if node.eased_in == calls or node.kind.over_limit ~= 'queue' then return end
    node.eased_in, eased_count = calls, eased_count + 1
    eased[eased_count] = node
  end

  local changed, changed_count = {}, 0 -- the limits whose used amounts this call has changed, and their number
  -- For each limit at `positions` in the list `found`, add `sign` * `amounts[unit]` to its used amount.
  local function add(found, positions, amounts, sign)
    local has_waiting = pool.queued > 0
    for i = 1, #positions do
      local limit = found[positions[i]]
      local amount = sign * amounts[limit.unit]
      if amount ~= 0 then
        local owed = limit.owed + amount
        if owed < 0 then owed = 0 end
        limit.owed = owed
        if limit.changed_in ~= calls then
          limit.changed_in, changed_count = calls, changed_count + 1
          changed[changed_count] = limit
        end
        if has_waiting and amount < 0 and limit.unit ~= 'served' then quotas.ease(limit.node) end
      end
    end
  end

  local function store_balances()
    if changed_count == 0 then return end
    local entry, at_ms = deferred_entry('HSET', key.balances), now_us / 1000
    local n = entry.n
    for i = 1, changed_count do
      local limit = changed[i]
      entry[n + 1], entry[n + 2] = limit.field, encode(limit)
      n = n + 2
      limit.stored, limit.stored_ms, limit.changed_in = limit.owed, at_ms, 0
    end
    entry.n, changed_count = n, 0
  end
  quotas.commit = store_balances

  local seen, balances -- the request for which balances were looked up last, and these balances
  -- Drop the cached settings and balances of nodes, after writing changed balances.
  function quotas.forget()
    store_balances()
    tenants.forget()
    seen = nil
  end

  local FREE = {prompt = 1, cached = 1, answer = 1}
  local function cost_of(r, prompt, cached, answer)
    local prices = settings.tenants.prices
    local price = prices and (prices[r.model] or prices['*']) or FREE
    return (prompt - cached) * (price.prompt or 1) + cached * (price.cached or price.prompt or 1)
      + answer * (price.answer or 1)
  end

  -- A record keeps the request's charge: `charged_prompt` and `charged_answer` tokens, and in `charged` the limits that
  -- have charged the request, each by its node's level in the tree, unit and period. So each limit charges and refunds
  -- a request once, however nodes change, and a change of nodes need not look at waiting requests: when a request
  -- starts, the limits that have not charged the request do so. If `settings.tenancy` differs from the record's
  -- `tenancy`, the record's charges are void: tenants' limits were switched off or on meanwhile. A record whose
  -- `tenancy` is 0 has no charge.

  -- Read and return the balances of request r's nodes (tenants.counting); nil if no node has a limit for r.
  local function balances_of(r)
    if seen == r then return balances end
    if r.tenancy == 0 then return nil end
    local tenancy = settings.tenancy or 1
    if r.tenancy ~= tenancy then r.tenancy, r.charged = tenancy, '' end
    local found = tenants.counting[r.flow]
    if #found == 0 then return nil end
    if found.read_in ~= calls then prefetch(found) end
    seen, balances = r, found
    return found
  end

  -- Return the name under which a node of request r's path stands in an order: a flow queue's or an inner node's name.
  local function member_of(node, r) return node.path == r.flow and r.flow or node.path .. INNER end

  local taken, weighed = {requests = 1, parallel = 1}, nil -- `weighed`: `taken` has this request's amounts
  -- Return the amounts that limits charge for request r, by unit.
  local function amounts_of(r)
    if weighed == r then return taken end
    local prompt, answer = r.charged_prompt, r.charged_answer
    taken.tokens, taken.prompt_tokens, taken.answer_tokens, taken.served = prompt + answer, prompt, answer, r.cost
    taken.budget = settings.tenants.prices and cost_of(r, prompt, 0, answer) or prompt + answer
    weighed = r
    return taken
  end

  -- Return whether the limits at `positions` in the list `found` suffice for request r.
  local function suffice(found, positions, r)
    local amounts = amounts_of(r)
    for i = 1, #positions do
      local limit = found[positions[i]]
      if limit.burst - limit.owed + RESIDUE < amounts[limit.unit] then return false end
    end
    return true
  end

  -- Among the limits of `node` at `positions` in the list `found`, return the limit for which request r must wait
  -- longest, the ms until the limit suffices (infinite for a limit on requests in flight), and whether r is larger than
  -- the limit's burst; nil if the node's limits suffice.
  local function lack(node, found, positions, r)
    local worst, worst_ms
    local amounts = amounts_of(r)
    for i = 1, #positions do
      local limit = found[positions[i]]
      local amount, left = amounts[limit.unit], limit.burst - limit.owed
      if limit.node == node and amount > limit.burst + RESIDUE then return limit, math.huge, true end
      if limit.node == node and left + RESIDUE < amount then
        local wait_ms = limit.rate and (amount - left) / limit.rate or ms_left(limit.per)
        if not worst or wait_ms > worst_ms then worst, worst_ms = limit, wait_ms end
      end
    end
    return worst, worst_ms, false
  end

  local function described(node, limit) return '\31' .. limit.unit .. ' ' .. limit.per .. ' ' .. node.path end

  local function log_charge(event, r, phase)
    local prompt, answer = r.charged_prompt, r.charged_answer
    local text = string.format('%s %.17g %.17g %.17g', phase, prompt, answer, cost_of(r, prompt, 0, answer))
    log_event(event, r, nil, nil, r.demoted == 1 and text .. ' demoted' or text)
  end

  -- Charge request r to the limits at `positions`, a list of `tenants.charges`; with `sign` -1 refund the charge.
  local function charge(r, found, positions, sign, phase)
    add(found, positions, amounts_of(r), sign)
    r.charged = tenants.charged(found.shape, r.charged, positions, sign)
    if settings.log_max > 0 then log_charge(sign > 0 and 'charged' or 'refunded', r, phase) end
  end

  local LONGEST_RETRY_S = 31 * 86400
  -- Return the refusal for a limit that suffices in `wait_ms`, and the refusal's Retry-After.
  local function refusal_for(wait_ms, node, limit)
    local wait_s = wait_ms < math.huge and math.max(1, math.ceil(wait_ms / 1000 - RESIDUE)) or 1
    local retry_s = math.min(wait_s, LONGEST_RETRY_S)
    return 'refused ' .. REFUSED.OVER_LIMIT .. ' ' .. retry_s .. described(node, limit), wait_s
  end

  -- The limits at `uncharged` do not suffice for request r: return a refusal, mark r as demoted, or let r wait (nil). A
  -- request that `has_waited`, and may wait no longer, is refused. If several nodes refuse r, the refusal names the
  -- limit for which r must wait longest.
  local function exceed(found, uncharged, r, has_waited)
    local longest_s, told = 0, nil
    for _, node in ipairs(found.nodes) do
      local limit, wait_ms, is_over_burst = lack(node, found, uncharged, r)
      if limit and limit.over_limit == 'demote' and not has_waited then
        r.demoted = 1
      elseif is_over_burst then
        return 'refused ' .. REFUSED.OVER_BURST .. ' 0' .. described(node, limit)
      elseif limit and (has_waited or limit.over_limit == 'reject' or settings.queue_enabled == 0) then
        local refusal, retry_s = refusal_for(wait_ms, node, limit)
        if retry_s > longest_s then longest_s, told = retry_s, refusal end
      end
    end
    return told
  end

  -- Charge an arriving request to the limits that reject or demote, and move a demoted request to the lowest band. If a
  -- limit rejects the request, charge nothing and return the refusal, which names the limit and the balances.
  local starting -- the request that arrived last, if all its limits suffice and no balance has changed since
  function quotas.arrive(r)
    local found = tenants.counting[r.flow]
    starting, weighed, seen = nil, nil, nil
    if #found == 0 then return nil end
    if found.read_in ~= calls then prefetch(found) end
    r.charged_prompt, r.charged_answer, r.charged, r.demoted = r.prompt_tokens, r.answer_tokens, '', 0
    local lists = tenants.charges(found.shape, r)
    local suffices = suffice(found, lists.uncharged, r)
    local refusal = not suffices and exceed(found, lists.uncharged, r)
    if refusal then return refusal .. quotas.balances(found) end
    if r.demoted == 1 then lists, r.band = tenants.charges(found.shape, r), BANDS[#BANDS] end
    r.tenancy, seen, balances = settings.tenancy or 1, r, found
    if lists.arrive[1] or settings.log_max > 0 then charge(r, found, lists.arrive, 1, 'arrival') end
    if suffices then starting = r end
  end

  -- Keep r's estimated tokens in its record: a limit that is set while r waits needs these to charge r.
  function quotas.wait(r)
    if r.tenancy > 0 then return end
    r.charged_prompt, r.charged_answer, r.charged, r.demoted = r.prompt_tokens, r.answer_tokens, '', 0
    r.tenancy = settings.tenancy or 1
  end

  -- Return the text of a refusal in the decision log: 'over-limit UNIT PER_MS PATH'.
  function quotas.reason(refusal)
    local reason, limit = string.match(refusal, '^refused (%S+) %d+\31([^\31]*)')
    return reason .. ' ' .. limit
  end

  -- Undo the charge that `quotas.arrive` made for a request which is then refused.
  function quotas.refused(r)
    local found = balances_of(r)
    if found then charge(r, found, tenants.charges(found.shape, r).charged, -1, 'arrival') end
  end

  -- Return the highest member of r's path whose balance does not suffice for r, the ms until it does (infinite: until a
  -- request ends), and whether r must not wait, because a lowered limit can never suffice or the node no longer lets
  -- requests wait; nil if r may start.
  function quotas.lacking(r)
    local found = starting ~= r and balances_of(r)
    local uncharged = found and tenants.charges(found.shape, r).uncharged
    if not uncharged or suffice(found, uncharged, r) then return nil end
    for _, node in ipairs(found.nodes) do
      local limit, wait_ms, is_over_burst = lack(node, found, uncharged, r)
      if limit then return member_of(node, r), wait_ms, is_over_burst or limit.over_limit ~= 'queue' end
    end
  end

  -- The limits at `uncharged` suffice for request r, but an earlier request may wait for more balance of a node of r's
  -- path, and hold up r: return the refusal, which names the node's limit with the least fraction left; else nil.
  local function held_up(found, uncharged, r)
    for _, node in ipairs(found.nodes) do
      local at_ms, most = read('ZSCORE', key.budget_waits, joined(r.band, member_of(node, r))), nil
      local wait_ms = at_ms and tonumber(at_ms) - now_ms or 0
      for i = 1, wait_ms > 0 and #uncharged or 0 do
        local limit = found[uncharged[i]]
        local is_waited_for = limit.node == node and (limit.rate or limit.unit == 'budget')
        if is_waited_for and not (most and most.owed / most.burst >= limit.owed / limit.burst) then most = limit end
      end
      if most then return (refusal_for(wait_ms, node, most)) end
    end
  end

  -- Request r may wait no longer: if r waits for a tenant's limit, return r's refusal, else nil.
  function quotas.expiry(r)
    local found = balances_of(r)
    local uncharged = found and tenants.charges(found.shape, r).uncharged
    if not uncharged then return nil end
    local refuse = suffice(found, uncharged, r) and held_up or exceed
    local refusal = refuse(found, uncharged, r, true)
    return refusal and refusal .. quotas.balances(found)
  end

  -- When request r starts, charge r to each tenant limit that did not charge r at its arrival. With `sign` -1 r returns
  -- to the queue: refund the charges of limits that let requests wait (`over_limit: queue`), and the cost served.
  function quotas.start(r, sign)
    local found = balances_of(r)
    if not found then return end
    local lists = tenants.charges(found.shape, r)
    charge(r, found, sign > 0 and lists.start or lists.restart, sign, 'grant')
    starting = nil
  end

  -- Note the reported usage of request r; `quotas.ended(r)` must follow in this call. If `prompt` is negative, the
  -- prompt's tokens are unknown, and `answer` is a lower bound.
  local corrected, change = nil, {requests = 0, parallel = -1} -- the request with known usage; what its end adds
  function quotas.used(r, prompt, cached, answer)
    if not balances_of(r) or prompt < 0 and answer <= r.charged_answer then return end
    local former_prompt, former_answer = r.charged_prompt, r.charged_answer
    if prompt < 0 then prompt, cached = former_prompt, 0 end
    local cost, former_cost = prompt + answer, former_prompt + former_answer
    change.tokens = cost - former_cost
    change.prompt_tokens, change.answer_tokens = prompt - former_prompt, answer - former_answer
    if settings.tenants.prices then
      cost, former_cost = cost_of(r, prompt, cached, answer), cost_of(r, former_prompt, 0, former_answer)
    end
    change.budget, corrected = cost - former_cost, r
    if settings.log_max > 0 then
      log_event('used', r, nil, nil, string.format('%.17g %.17g %.17g %.17g', prompt, cached, answer, cost))
    end
  end

  -- Add r to the counts of former limits on requests in flight of the nodes at `levels`, or remove r (`sign` -1): if
  -- such a limit comes back, its count must be exact.
  local ONE = {1}
  local function count_former(r, levels, sign)
    for i = 1, #levels do
      local path = tenants.paths(r.flow)[levels[i]]
      local count = path and tenants.former(path)
      if count and count.changed_in ~= calls then
        count.owed = decode(count, read('HGET', key.balances, count.field))
      end
      if count and count.owed + sign >= 0 then add({count}, ONE, taken, sign) end
    end
  end

  -- End a request's charge: correct the charge by the reported usage; without usage, refund the whole charge if the
  -- request ended `unserved`, else only its place among the requests in flight.
  function quotas.ended(r, unserved)
    local found = balances_of(r)
    if not found then
      if r.tenancy > 0 then count_former(r, tenants.charges(tenants.counting[r.flow].shape, r).former, -1) end
      return
    end
    local lists = tenants.charges(found.shape, r)
    count_former(r, lists.former, -1)
    if corrected == r then
      add(found, lists.charged, change, 1)
    elseif unserved and r.charged ~= '' then
      charge(r, found, lists.charged, -1, 'all')
    else
      add(found, lists.running, change, 1)
    end
    -- The ended request may be why its tenant's nodes are throttled. Their next request may need a smaller balance, so
    -- let the nodes try again.
    local uncharged = record.is_waiting(r) and pool.queued > 0 and lists.uncharged or {}
    for i = 1, #uncharged do quotas.ease(found[uncharged[i]].node) end
    r.tenancy, seen = 0, nil
  end

  -- For the admin API: describe a node, in the form of `view_tenants` (view.lua).
  function quotas.describe(path, wait)
    if not settings.tenants then return {path, '', '', '', '', ''} end
    local node, text, from, is_change = tenants.node(path), tenants.settings_of(path)
    prefetch(tenants.counting[path])
    local served = node.served and exact(node.served.owed) or ''
    local told = {path, from and (is_change and 1 or 0) or '', from or '', text or '', served, wait}
    local lacks_place = false
    for i = 1, #node.kind.limits do
      local limit = node[i]
      local granted = limit.owed
      lacks_place = lacks_place or limit.unit == 'parallel' and limit.burst - granted + RESIDUE < 1
      local reset_ms = limit.rate and granted / limit.rate or limit.unit == 'budget' and ms_left(limit.per) or 0
      local numbers = {limit.amount or limit.burst, limit.burst, limit.burst - granted, reset_ms}
      told[#told + 1], told[#told + 2] = limit.unit, limit.per
      for _, number in ipairs(numbers) do told[#told + 1] = exact(number) end
    end
    -- A leaf that waits for the end of a request may also wait for its flow's limit, or for an endpoint.
    if wait == '0' and not lacks_place then told[6] = '' end
    return told
  end

  -- Subtract `amount` from the used part of a node's limit, down to 0 at most. Return the free part of the limit; nil
  -- if the node has no limit of this unit and period.
  function quotas.top_up(path, unit, per, amount)
    local node = tenants.node(path)
    prefetch(tenants.counting[path])
    for _, limit in ipairs(node) do
      if limit.unit == unit and tostring(limit.per) == per then
        add({limit}, {1}, {[unit] = amount}, -1)
        return limit.burst - limit.owed
      end
    end
  end

  -- Among the limits at `positions`, find the limit with the least fraction left. Return its position, the units that
  -- it has left, and the ms until its used part has leaked away.
  local function least_left(found, positions)
    local at = positions[1]
    local most = found[at]
    for i = 2, #positions do
      local limit = found[positions[i]]
      if limit.owed / limit.burst > most.owed / most.burst then at, most = positions[i], limit end
    end
    local owed, burst = most.owed, most.burst
    -- The format %d rounds down; `+ 1 - RESIDUE` makes it round the time up.
    return at, burst > owed and burst - owed + RESIDUE or 0, owed / most.rate + 1 - RESIDUE
  end

  -- Return the text of the balances for an answer's headers, beginning with byte 31; '' without limits. The text shows
  -- the limit on requests and the limit on tokens that have the least fraction left in the list `found`.
  function quotas.balances(found)
    local shape = found.shape
    local lists = shape.shown
    if not lists[1] then return '' end
    local at, left, reset_ms = least_left(found, lists[1])
    local constants = shape[at]
    if not lists[2] then return string.format(constants.shown_as, left, reset_ms) end
    local other_at, other_left, other_reset_ms = least_left(found, lists[2])
    local other = shape[other_at]
    local format = constants.shown_with[other]
    if not format then
      format = constants.shown_as .. ';' .. string.sub(other.shown_as, 2)
      constants.shown_with[other] = format
    end
    return string.format(format, left, reset_ms, other_left, other_reset_ms)
  end

  -- Return the text of the balances of request r's nodes, and whether r was demoted.
  function quotas.shown(r)
    if r.tenancy == 0 then return '' end
    local found = balances_of(r)
    -- No limit charges a request after its placement, so the record of a placed request needs no estimate of tokens.
    if not found and not string.find(r.charged, 'parallel', 1, true) then r.tenancy = 0 end
    local text = found and quotas.balances(found) or ''
    if r.demoted == 1 then text = text .. (text == '' and '\31' or ';') .. 'demoted=1' end
    return text
  end

  -- The times when the balances of throttled members will suffice. Between calls this library caches a lower bound of
  -- the earliest time.
  local next_wake_ms
  function quotas.wake_at(band, member, at_ms)
    if next_wake_ms and at_ms < next_wake_ms then next_wake_ms = at_ms end
    defer_write('ZADD', key.budget_waits, at_ms, joined(band, member))
    local own = notifications.for_caller
    own[#own + 1] = 'wake ' .. math.max(1, at_ms - now_ms)
  end

  -- Return a list of {band, member}: throttled members whose limits suffice by now, and the eased nodes.
  local MOST_DUE = 100
  function quotas.due()
    local due = {}
    for _, band in ipairs(eased_count > 0 and BANDS or {}) do
      if pool[QUEUED[band]] > 0 and read('ZCARD', key.throttled[band]) > 0 then
        for i = 1, eased_count do
          due[#due + 1], due[#due + 2] = {band, eased[i].path}, {band, eased[i].path .. INNER}
        end
      end
    end
    for i = 1, eased_count do eased[i].eased_in = nil end
    eased_count = 0
    if next_wake_ms and now_ms < next_wake_ms then return due end
    for _, name in ipairs(read('ZRANGEBYSCORE', key.budget_waits, '-inf', now_ms, 'LIMIT', 0, MOST_DUE)) do
      defer_write('ZREM', key.budget_waits, name)
      local band, member = string.match(name, '^(%d+)\31(.*)$')
      if band then due[#due + 1] = {tonumber(band), member} end
    end
    next_wake_ms = tonumber(read('ZRANGE', key.budget_waits, 0, 0, 'WITHSCORES')[2] or math.huge)
    return due
  end

  -- Reset the variables that hold data of the last script call.
  function quotas.reset()
    calls, changed_count, eased_count = calls + 1, 0, 0
    starting, corrected, weighed, seen = nil, nil, nil, nil
    if not cache_is_valid then next_wake_ms = nil end
  end

  -- Void all charges and counts of requests in flight: return a new `tenancy`, which the caller puts in the settings.
  function quotas.restart()
    quotas.forget()
    return math.max((settings.tenancy or 1) + 1, now_ms)
  end

  -- Count each node's requests in flight again, from the records of requests.
  function quotas.recount(records)
    local former = settings.tenancy or 1
    settings.tenancy, settings_text = quotas.restart(), nil
    defer_write('HSET', key.pool, 'settings', cjson.encode(settings))
    for _, r in ipairs(records) do
      if r.tenancy == former and record.read(r.id) then
        r.tenancy = settings.tenancy
        local found = balances_of(r)
        if found then add(found, tenants.charges(found.shape, r).running, taken, 1) end
        count_former(r, tenants.charges(tenants.counting[r.flow].shape, r).former, 1)
        record.put(r)
      end
    end
  end

  -- Charge running requests to limits on requests in flight that were set after the requests started. A call scans
  -- from `cursor` on and finds about COUNTED running requests. Return whether the sweep must go on.
  local COUNTED, MOST_SCANNED = 16, 200
  function quotas.count_running(cursor)
    local running = math.max(read('ZCARD', key.inflight), 1)
    local most = math.min(math.ceil(COUNTED * read('HLEN', key.requests) / running), MOST_SCANNED)
    local scan = read('HSCAN', key.requests, cursor, 'COUNT', most)
    for i = 1, #scan[2], 2 do
      local r = record.from_scan(scan[2][i], scan[2][i + 1])
      local runs = r and not record.is_waiting(r)
      if runs and r.tenancy == 0 then
        r.charged_prompt, r.charged_answer, r.charged, r.demoted, r.tenancy = 0, 0, '', 0, settings.tenancy or 1
      end
      local found, bounds = runs and balances_of(r), {}
      for _, position in ipairs(found and tenants.charges(found.shape, r).uncharged or {}) do
        if found[position].unit == 'parallel' then bounds[#bounds + 1] = position end
      end
      if bounds[1] then
        charge(r, found, bounds, 1, 'running')
        record.put(r)
      end
    end
    defer_write('HSET', key.pool, 'bounds_cursor', scan[1])
    return scan[1] ~= '0'
  end

  -- For the sweep: drop some balances without effect. Looking up a node costs as much as ten commands, so a call looks
  -- at MOST_OLD balances at most, and only at balances whose period has passed: a removed limit may come back.
  local MOST_OLD = 32
  function quotas.drop_idle_balances(count)
    local found, texts = tenants.random_fields(key.balances, count)
    local looked_at = 0
    for i, field in ipairs(found) do
      local path, kind = string.match(field, '^(.*)\31([^\31]*)$')
      local per = string.match(kind or '', ':(%w+)$')
      local per_ms, valid, _, at_ms = tonumber(per), pcall(struct.unpack, 'dd', texts[i])
      local is_recent = per_ms and valid and now_ms - at_ms < per_ms
        or kind == 'parallel' and decode(tenants.FORMER, texts[i]) > 0
        or string.find(kind or '', '^budget:') and tonumber(string.match(texts[i], '^%d+')) == period_of(per)
      if looked_at < MOST_OLD and not is_recent then
        looked_at = looked_at + 1
        local node = tenants.node(path or '')
        local is_idle = true
        for _, limit in ipairs(node) do
          local owed = node.read_in == calls and limit.owed or decode(limit, texts[i])
          if limit.field == field then is_idle = owed == 0 and limit ~= node.served end
        end
        if is_idle then defer_write('HDEL', key.balances, field) end
      end
    end
  end
end
