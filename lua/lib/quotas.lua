-- include: tenants
-- What requests take of the limits of their tenants. A limit of `amount` units per `per_ms` is a leaky bucket (ITU-T
-- I.371, continuous-state leaky bucket): `owed` units leak at amount / per_ms, and a request that takes c units may
-- start while owed + c <= `burst`. Requests are charged by estimate and corrected by usage, so `owed` may pass `burst`.
-- A budget counts what a calendar period has spent. The hash `balances` has both, and requests in flight; the hash
-- `charges` has what each request was charged.
-- Uses nodes from lib/tenants.lua, reads and writes from lib/storage.lua, the clock and settings from lib/pool.lua.
-- Defines `quotas`.
local quotas = {}
do -- a chunk may have 200 locals
  local INNER, counting, MOST_KEPT = tenants.INNER, tenants.counting, 4096

  -- Balances: field -> what the limit has granted: units owed now, units spent in this period, or requests in flight;
  -- for `served` the cost served. Each call reads a field once, and writes it once. They are cached between calls while
  -- only this library changes the pool.
  local balances, changed_balances = {}, {} -- field -> number; field -> its limit
  local stored, stored_at, stored_count = {}, {}, 0 -- field -> the number as last written, and when (ms)
  local SERVED = {unit = 'served'}
  local decode -- (limit, text) -> number

  local READ_AT_ONCE = 1000 -- unpack() puts its values on a stack of limited depth
  -- Take a balance from the cache. Return false if the cache lacks it.
  local function take_cached(limit, field)
    local number = stored[field]
    if not number or limit.unit == 'budget' then return false end
    if limit.rate then
      number = number - (now_us / 1000 - stored_at[field]) * limit.rate
      if number < 0 then number = 0 end
    end
    balances[field] = number
    return true
  end

  local wanted, asked = {}, {} -- reused by each call: the limits and the fields to read
  local function want(found, count)
    for i = 1, #found do
      local node = found[i]
      for j = 1, #node.limits do
        local limit = node.limits[j]
        if balances[limit.field] == nil and not take_cached(limit, limit.field) then
          count = count + 1
          asked[count], wanted[count], balances[limit.field] = limit.field, limit, false
        end
      end
      local served = node.served_field
      if served and balances[served] == nil and not take_cached(SERVED, served) then
        count = count + 1
        asked[count], wanted[count], balances[served] = served, SERVED, false
      end
    end
    return count
  end

  local function read_wanted(count)
    for first = 1, count, READ_AT_ONCE do
      local last = math.min(first + READ_AT_ONCE - 1, count)
      local texts = read('HMGET', key.balances, unpack(asked, first, last))
      for i = first, last do balances[asked[i]] = decode(wanted[i], texts[i - first + 1]) end
    end
  end

  local calls = 0 -- number of this call
  -- Let `balances` have the balances of a flow's nodes.
  local function prefetch(found)
    if found.read_in == calls then return end
    read_wanted(want(found, 0))
    found.read_in = calls
  end

  -- Periods of budgets, by the pool's clock in UTC: the number of a period, and the ms until it ends.
  local DAY_MS = 86400000
  -- The number of days since 1970-01-01 of the first day of a month; months are counted from January of year 0
  -- (Hinnant, "chrono-Compatible Low-Level Date Algorithms").
  local function first_day(months)
    local year, month = math.floor(months / 12), months % 12 + 1
    if month <= 2 then year = year - 1 end
    local era = math.floor(year / 400)
    local of_era = year - era * 400
    local day = math.floor((153 * ((month + 9) % 12) + 2) / 5)
    return era * 146097 + of_era * 365 + math.floor(of_era / 4) - math.floor(of_era / 100) + day - 719468
  end

  local function period_of(name)
    local days = math.floor(now_ms / DAY_MS)
    if name == 'day' then return days, (days + 1) * DAY_MS - now_ms end
    if name == 'week' then -- from Monday on; 1970-01-01 was a Thursday
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
    if limit.unit ~= 'budget' then return tonumber(text) or 0 end
    local period, spent = string.match(text, '^(%d+) (%S+)$')
    return tonumber(period) == period_of(limit.per) and tonumber(spent) or 0
  end

  local function encode(limit, number)
    if limit.rate then return struct.pack('dd', number, now_us / 1000) end
    if limit.unit == 'budget' then return period_of(limit.per) .. ' ' .. exact(number) end
    return exact(number)
  end

  -- Add `amount` to what a limit has granted; a negative amount is a refund.
  local changes = 0 -- how often a balance was changed in this process
  local function take(limit, amount)
    changes = changes + 1
    local field = limit.field
    local granted = balances[field] + amount
    balances[field], changed_balances[field] = granted > 0 and granted or 0, limit
  end

  local NONE = {} -- no limits
  local BUDGET, FREE = {unit = 'budget'}, {prompt = 1, cached = 1, answer = 1}
  local function price_of(model)
    local prices = settings.tenants.prices
    return prices and (prices[model] or prices['*']) or FREE
  end

  -- What a request takes of a limit: `prompt` and `answer` tokens, `cached` prompt tokens among them.
  local function amount_of(limit, r, prompt, cached, answer)
    if limit.fixed then return limit.fixed + limit.prompt * prompt + limit.answer * answer end
    local price = price_of(r.model)
    return (prompt - cached) * (price.prompt or 1) + cached * (price.cached or price.prompt or 1)
      + answer * (price.answer or 1)
  end

  -- What each request was charged: prompt and answer tokens, and when. `arrival` and `grant` say which nodes were
  -- charged; no demoted request is charged to a node that demotes.
  local charges, changed_charges = {}, {} -- id -> charge, or false; id -> true
  local function parse_charge(id, text)
    local valid, flags, prompt, answer = pcall(struct.unpack, 'Bdd', text or '')
    charges[id] = valid and {prompt = prompt, answer = answer, arrival = flags % 2 == 1, grant = flags % 4 >= 2,
      demoted = flags >= 4}
    return charges[id]
  end

  local function charge_of(r)
    local charge = charges[r.id]
    if charge ~= nil then return charge end
    return parse_charge(r.id, read('HGET', key.charges, r.id))
  end

  local function is_charged(node, charge, phase)
    if node.over_limit == 'queue' then return phase == 'grant' end
    return phase == 'arrival' and not (charge.demoted and node.over_limit == 'demote')
  end

  -- Whether a node has been charged for a request, in the only phase that may charge the node.
  local function has_charged(node, charge)
    local phase = node.over_limit == 'queue' and 'grant' or 'arrival'
    return charge[phase] and is_charged(node, charge, phase)
  end

  -- The member of an order that a node of request r's path is.
  local function member_of(node, r) return node.path == r.flow and r.flow or node.path .. INNER end

  -- Read the charges and balances of the first `count` of `requests`, or the balances only, with one command each.
  function quotas.prefetch(requests, count, are_charged)
    local ids, fields = {}, 0
    for i = 1, count do
      local found = counting(requests[i].flow)
      if #found > 0 then
        if found.read_in ~= calls then fields, found.read_in = want(found, fields), calls end
        if are_charged and charges[requests[i].id] == nil then ids[#ids + 1] = requests[i].id end
      end
    end
    read_wanted(fields)
    if #ids == 0 then return end
    local texts = read('HMGET', key.charges, unpack(ids))
    for i = 1, #ids do parse_charge(ids[i], texts[i]) end
  end

  local function take_all(r, charge, phase, sign)
    local found, prompt, answer = counting(r.flow), charge.prompt, charge.answer
    for i = 1, #found do
      local node = found[i]
      if is_charged(node, charge, phase) then
        local limits = node.limits
        for j = 1, #limits do take(limits[j], sign * amount_of(limits[j], r, prompt, 0, answer)) end
      end
    end
    charge[phase], changed_charges[r.id] = sign > 0, true
  end

  -- Return the limit of a node that lacks the most for request r, the ms until it suffices (infinite for requests in
  -- flight), and whether the request is larger than the limit grants at once; nil if the node lacks nothing.
  local function lack(node, r, charge)
    local worst, worst_ms
    local limits, prompt, answer = node.limits, charge.prompt, charge.answer
    for i = 1, #limits do
      local limit = limits[i]
      local amount = amount_of(limit, r, prompt, 0, answer)
      if amount > limit.burst + RESIDUE then return limit, math.huge, true end
      local left = limit.burst - balances[limit.field]
      if left + RESIDUE < amount then
        local wait_ms = limit.rate and (amount - left) / limit.rate or math.huge
        if limit.unit == 'budget' then wait_ms = ms_left(limit.per) end
        if not worst or wait_ms > worst_ms then worst, worst_ms = limit, wait_ms end
      end
    end
    return worst, worst_ms, false
  end

  local function described(node, limit) return '\31' .. limit.unit .. ' ' .. limit.per .. ' ' .. node.path end

  local function log_charge(event, r, phase, charge)
    if settings.log_max == 0 then return end
    local text = string.format('%s %.17g %.17g %.17g', phase, charge.prompt, charge.answer,
      amount_of(BUDGET, r, charge.prompt, 0, charge.answer))
    log_event(event, r, nil, nil, charge.demoted and text .. ' demoted' or text)
  end

  -- Charge an arriving request to the nodes that reject or demote, and move a request that such a node demotes to the
  -- lowest band. Return a refusal and a text that names the limit, and charge nothing, if a limit forbids the request.
  local LONGEST_RETRY_S = 31 * 86400
  function quotas.arrive(r)
    local found = counting(r.flow)
    if #found == 0 then return nil end
    prefetch(found)
    local charge = {prompt = r.prompt_tokens, answer = r.answer_tokens, arrival = false, grant = false, demoted = false}
    local suffices = true
    for _, node in ipairs(found) do
      local limit, wait_ms, is_over_burst = lack(node, r, charge)
      if limit then suffices = false end
      if limit and node.over_limit == 'demote' then
        charge.demoted = true
      elseif is_over_burst then
        return 'refused ' .. REFUSED.OVER_BURST .. ' 0' .. described(node, limit)
      elseif limit and (node.over_limit == 'reject' or settings.queue_enabled == 0) then
        local retry_s = wait_ms < math.huge and math.ceil(wait_ms / 1000 - RESIDUE) or 1
        return 'refused ' .. REFUSED.OVER_LIMIT .. ' ' .. math.max(1, math.min(retry_s, LONGEST_RETRY_S))
          .. described(node, limit)
      end
    end
    if charge.demoted then r.band = BANDS[#BANDS] end
    charges[r.id] = charge
    take_all(r, charge, 'arrival', 1)
    if suffices then charge.sufficed = changes end
    log_charge('charged', r, 'arrival', charge)
  end

  -- The text of a refusal in the decision log: 'over-limit UNIT PER_MS PATH'.
  function quotas.reason(refusal)
    local reason, limit = string.match(refusal, '^refused (%S+) %d+\31(.*)$')
    return reason .. ' ' .. limit
  end

  -- Undo the charge of a request that is refused after `arrive`.
  function quotas.refused(r)
    local charge = charges[r.id]
    if not charge then return end
    take_all(r, charge, 'arrival', -1)
    log_charge('refunded', r, 'arrival', charge)
    charges[r.id], changed_charges[r.id] = false, true
  end

  -- Return the highest member of r's path that lacks balance for r, and the ms until it suffices (infinite until a
  -- request ends); nil if r may start.
  function quotas.lacking(r)
    local found = counting(r.flow)
    if #found == 0 then return nil end
    local charge = charge_of(r)
    if not charge or charge.sufficed == changes then return nil end -- nothing has changed since r arrived
    prefetch(found)
    for _, node in ipairs(found) do
      local limit, wait_ms
      if node.over_limit == 'queue' then limit, wait_ms = lack(node, r, charge) end
      if limit then return member_of(node, r), wait_ms end
    end
  end

  local function count_served(found, cost)
    for _, node in ipairs(found) do
      local field = node.served_field
      if field then balances[field], changed_balances[field] = balances[field] + cost, SERVED end
    end
  end

  -- Charge a request that starts to the nodes that queue.
  function quotas.start(r)
    local found = counting(r.flow)
    local charge = #found > 0 and charge_of(r)
    if not charge then return end
    prefetch(found)
    take_all(r, charge, 'grant', 1)
    count_served(found, r.cost)
    log_charge('charged', r, 'grant', charge)
  end

  -- Undo `start`: the request returns to the queue.
  function quotas.sent_back(r)
    local found = counting(r.flow)
    local charge = #found > 0 and charge_of(r)
    if not (charge and charge.grant) then return end
    prefetch(found)
    take_all(r, charge, 'grant', -1)
    count_served(found, -r.cost)
    log_charge('refunded', r, 'grant', charge)
  end

  -- Correct the charge of a request by its usage. Later, the request's end finds nothing to refund.
  function quotas.used(r, prompt, cached, answer)
    local found = counting(r.flow)
    local charge = #found > 0 and charge_of(r)
    if not charge then return end
    prefetch(found)
    for i = 1, #found do
      local limits = has_charged(found[i], charge) and found[i].limits or NONE
      for j = 1, #limits do
        local limit = limits[j]
        if limit.unit ~= 'parallel' then
          take(limit, amount_of(limit, r, prompt, cached, answer)
            - amount_of(limit, r, charge.prompt, 0, charge.answer))
        end
      end
    end
    charge.prompt, charge.answer, charge.is_used = prompt, answer, true
    if settings.log_max > 0 then
      log_event('used', r, nil, nil, string.format('%.17g %.17g %.17g %.17g', prompt, cached, answer,
        amount_of(BUDGET, r, prompt, cached, answer)))
    end
  end

  -- End the charge of a request. Refund it if the request ended `unserved`, unless its usage is known. Return the
  -- members whose number of requests in flight has fallen.
  function quotas.ended(r, unserved)
    local found = counting(r.flow)
    local charge = #found > 0 and charge_of(r)
    if not charge then
      defer_write('HDEL', key.charges, r.id) -- the node has lost its limits
      return nil
    end
    prefetch(found)
    local is_refund, freed = unserved and not charge.is_used, nil
    for i = 1, #found do
      local node = found[i]
      local limits = (is_refund or node.has_parallel) and has_charged(node, charge) and node.limits or NONE
      for j = 1, #limits do
        local limit = limits[j]
        if limit.unit == 'parallel' then
          take(limit, -1)
          freed = freed or {}
          freed[#freed + 1] = member_of(node, r)
        elseif is_refund then
          take(limit, -amount_of(limit, r, charge.prompt, 0, charge.answer))
        end
      end
    end
    if is_refund and (charge.arrival or charge.grant) then log_charge('refunded', r, 'all', charge) end
    charges[r.id], changed_charges[r.id] = false, true
    return freed
  end

  -- For the admin API: describe a node, in the form of `view_tenants` (view.lua).
  function quotas.describe(path, wait)
    if not settings.tenants then return {path, '', '', '', '', ''} end
    local node, text, from, is_change = tenants.node(path), tenants.settings_of(path)
    prefetch({node})
    local served = node.served_field and exact(balances[node.served_field]) or ''
    local told = {path, from and (is_change and 1 or 0) or '', from or '', text or '', served, wait}
    for _, limit in ipairs(node.limits) do
      local granted = balances[limit.field]
      local reset_ms = limit.rate and granted / limit.rate or limit.unit == 'budget' and ms_left(limit.per) or 0
      local numbers = {limit.amount or limit.burst, limit.burst, limit.burst - granted, reset_ms}
      told[#told + 1], told[#told + 2] = limit.unit, limit.per
      for _, number in ipairs(numbers) do told[#told + 1] = exact(number) end
    end
    return told
  end

  -- Give back `amount` of what a limit of a node has granted, at most all. Return what is left; nil without the limit.
  function quotas.top_up(path, unit, per, amount)
    local node = tenants.node(path)
    prefetch({node})
    for _, limit in ipairs(node.limits) do
      if limit.unit == unit and tostring(limit.per) == per then
        take(limit, -amount)
        return limit.burst - balances[limit.field]
      end
    end
  end

  -- The one of two limits of which more is used; `limit` if there is no other.
  local function more_used(other, limit)
    if other and balances[other.field] / other.burst >= balances[limit.field] / limit.burst then return other end
    return limit
  end

  local function balance_of(limit)
    local owed = balances[limit.field]
    return string.format('%d,%d,%d', limit.burst, math.max(0, limit.burst - owed), math.ceil(owed / limit.rate))
  end

  -- The balances that an answer shows: of the limits on requests and on tokens the one with the least share left, and
  -- whether the request was demoted. A text that begins with byte 31; '' without limits.
  function quotas.shown(r)
    local found = counting(r.flow)
    local charge = #found > 0 and charge_of(r)
    if not charge then return '' end
    prefetch(found)
    local requests, tokens
    for i = 1, #found do
      local limits = found[i].limits
      for j = 1, #limits do
        local limit = limits[j]
        if limit.unit == 'requests' then
          requests = more_used(requests, limit)
        elseif limit.rate then
          tokens = more_used(tokens, limit)
        end
      end
    end
    local text = requests and '\31requests=' .. balance_of(requests) or ''
    if tokens then text = text .. (text == '' and '\31' or ';') .. 'tokens=' .. balance_of(tokens) end
    if charge.demoted then text = text .. (text == '' and '\31' or ';') .. 'demoted=1' end
    return text
  end

  function quotas.commit()
    for field, limit in pairs(changed_balances) do
      local number = balances[field]
      defer_write('HSET', key.balances, field, encode(limit, number))
      if not stored[field] then stored_count = stored_count + 1 end
      stored[field], stored_at[field] = number, now_us / 1000
    end
    for id in pairs(changed_charges) do
      local c = charges[id]
      if c then
        local flags = (c.arrival and 1 or 0) + (c.grant and 2 or 0) + (c.demoted and 4 or 0)
        defer_write('HSET', key.charges, id, struct.pack('Bdd', flags, c.prompt, c.answer))
      else
        defer_write('HDEL', key.charges, id)
      end
    end
  end

  -- Members whose balance is short: when it will suffice. Between calls this library caches a lower bound of the
  -- earliest time.
  local next_wake_ms
  function quotas.wake_at(band, member, at_ms)
    if next_wake_ms and at_ms < next_wake_ms then next_wake_ms = at_ms end
    defer_write('ZADD', key.budget_waits, at_ms, joined(band, member))
    local own = notifications.for_caller
    own[#own + 1] = 'wake ' .. math.max(1, at_ms - now_ms)
  end

  -- Return a list of band and member, of members whose time has come.
  local MOST_DUE = 100
  function quotas.due()
    if next_wake_ms and now_ms < next_wake_ms then return {} end
    local due = {}
    for _, name in ipairs(read('ZRANGEBYSCORE', key.budget_waits, '-inf', now_ms, 'LIMIT', 0, MOST_DUE)) do
      defer_write('ZREM', key.budget_waits, name)
      local band, member = string.match(name, '^(%d+)\31(.*)$')
      if band then due[#due + 1] = {tonumber(band), member} end
    end
    next_wake_ms = tonumber(read('ZRANGE', key.budget_waits, 0, 0, 'WITHSCORES')[2] or math.huge)
    return due
  end

  -- Reset the tables of a single call.
  function quotas.reset()
    if next(balances) then balances, changed_balances = {}, {} end
    if next(charges) then charges, changed_charges = {}, {} end
    calls = calls + 1
    if not cache_is_valid or stored_count > MOST_KEPT then stored, stored_at, stored_count = {}, {}, 0 end
    if not cache_is_valid then next_wake_ms = nil end
  end

  local function drop_counts()
    stored, stored_at, stored_count = {}, {}, 0
    local cursor = '0'
    repeat
      local scan = read('HSCAN', key.balances, cursor, 'COUNT', 1000)
      for i = 1, #scan[2], 2 do
        if string.find(scan[2][i], '\31parallel$') then defer_write('HDEL', key.balances, scan[2][i]) end
      end
      cursor = scan[1]
    until cursor == '0'
  end

  -- Forget which requests were charged, and the requests in flight: tenants begin or cease to count.
  function quotas.restart()
    defer_unlink(key.charges)
    drop_counts()
    tenants.forget()
  end

  -- Count the requests in flight again from the records.
  function quotas.recount(records)
    drop_counts()
    for _, r in ipairs(records) do
      local charge = charge_of(r)
      for _, node in ipairs(charge and counting(r.flow) or {}) do
        for _, limit in ipairs(has_charged(node, charge) and node.limits or {}) do
          if limit.unit == 'parallel' then
            balances[limit.field] = balances[limit.field] or 0
            take(limit, 1)
          end
        end
      end
    end
  end

  -- For the sweep: drop some balances without effect. Looking up a node costs as much as ten commands, so look at
  -- MOST_OLD balances at most, and at those of limits only once their period has passed.
  local MOST_OLD = 32
  function quotas.drop_idle_balances(count)
    local found, texts = tenants.random_fields(key.balances, count)
    local looked_at = 0
    for i, field in ipairs(found) do
      local path, kind = string.match(field, '^(.*)\31([^\31]*)$')
      local per_ms = tonumber(string.match(kind or '', ':(%d+)$'))
      local valid, _, at_ms = pcall(struct.unpack, 'dd', texts[i])
      local is_recent = per_ms and valid and now_ms - at_ms < per_ms
      if looked_at < MOST_OLD and not is_recent then
        looked_at = looked_at + 1
        local node = tenants.node(path or '')
        local is_idle = field ~= node.served_field
        for _, limit in ipairs(node.limits) do
          if limit.field == field then is_idle = (balances[field] or decode(limit, texts[i])) == 0 end
        end
        if is_idle then defer_write('HDEL', key.balances, field) end
      end
    end
  end
end
