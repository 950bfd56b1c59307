-- include: registry
-- Tenants: a flow is a path such as acme/search/key-17, and each node of the path may have a weight and limits.
-- Finds the nodes of a flow, and keeps the virtual times of inner nodes. lib/flows.lua orders the nodes; lib/quotas.lua
-- charges requests to the limits. Uses reads and writes from lib/storage.lua, the clock and settings from lib/pool.lua.
-- Defines `tenants`.

-- INNER: the last byte of an inner node's name in orders; no flow has it. MOST_KNOWN: most paths and nodes to cache.
local tenants = {INNER = '\30', MOST_KNOWN = 4096}
do -- a block of its own: Lua allows 200 local variables in a chunk
  local INNER, INNER_BYTE, MOST_LEVELS, MOST_KNOWN = tenants.INNER, 30, 8, tenants.MOST_KNOWN
  local separator -- the character that has split flows into the cached paths
  local paths, paths_known = {}, 0 -- flow -> its nodes' paths from the top, the flow last
  local parents, parents_known = {}, 0 -- member -> the inner node above; '' for the root
  local nodes, nodes_known = {}, 0 -- path -> its node
  local weights = {} -- member of an order -> its weight; false: no settings give a weight

  -- Drop paths that another separator has split. Each call and each change of settings calls this function.
  function tenants.use_separator()
    if not settings.tenants or separator == settings.tenants.separator then return end
    separator, paths, paths_known, parents, parents_known = settings.tenants.separator, {}, 0, {}, 0
  end

  -- Return the paths of a flow's nodes, from the top. If they are MOST_LEVELS, the last node is the whole flow.
  function tenants.paths(flow)
    local found = paths[flow]
    if found then return found end
    found = {}
    local from = 1
    while #found < MOST_LEVELS - 1 do
      local first, last = string.find(flow, separator, from, true)
      if not first then break end
      found[#found + 1] = string.sub(flow, 1, first - 1)
      from = last + 1
    end
    found[#found + 1] = flow
    if paths_known >= MOST_KNOWN then paths, paths_known = {}, 0 end
    paths[flow], paths_known = found, paths_known + 1
    return found
  end

  function tenants.is_inner(member) return string.byte(member, -1) == INNER_BYTE end

  local function find_parent(member)
    local path = tenants.is_inner(member) and string.sub(member, 1, -2) or member
    local all = tenants.paths(path)
    local found = #all > 1 and all[#all - 1] .. INNER or ''
    if parents_known >= MOST_KNOWN then parents, parents_known = {}, 0 end
    parents[member], parents_known = found, parents_known + 1
    return found
  end

  -- Return the inner node above a member of an order: a flow queue, or an inner node.
  function tenants.parent(member) return parents[member] or find_parent(member) end

  -- A node has its own settings, else the settings for all children of its parent (PARENT/*), else the settings for all
  -- nodes of its level (*/*). Nodes that share settings share one `kind`, which has the constants of the settings; a
  -- node keeps only its path and balances.
  local PERIODS = {day = true, week = true, month = true}
  local UNITS = {requests = true, tokens = true, prompt_tokens = true, answer_tokens = true}
  local function parse_kind(level, text)
    local kind = {over_limit = 'queue', limits = {}}
    local valid, found = pcall(cjson.decode, text or '{}')
    if not valid or type(found) ~= 'table' then
      strays = strays + 1
      return kind
    end
    kind.weight, kind.over_limit = tonumber(found.weight), found.over_limit or 'queue'
    local function add(limit, name)
      limit.name, limit.code, limit.over_limit = name, level .. name .. ',', kind.over_limit
      local shown_unit = limit.unit == 'requests' and 'requests' or 'tokens'
      limit.shown_as, limit.shown_with = string.format('\31%s=%d,%%d,%%d', shown_unit, limit.burst), {} -- formats
      limit.__index = limit -- the limits of all nodes with the same settings inherit from this table
      kind.limits[#kind.limits + 1] = limit
    end
    for _, each in ipairs(type(found.limits) == 'table' and found.limits or {}) do
      local amount, per_ms = tonumber(each.amount), tonumber(each.per_ms)
      if UNITS[each.unit] and amount and per_ms and amount > 0 and per_ms > 0 then
        add({unit = each.unit, per = per_ms, amount = amount, rate = amount / per_ms,
          burst = tonumber(each.burst) or amount}, each.unit .. ':' .. each.per_ms)
      end
    end
    local most, budget = tonumber(found.max_parallel), found.budget
    if most then add({unit = 'parallel', per = 0, burst = most}, 'parallel') end
    if type(budget) == 'table' and PERIODS[budget.period] and tonumber(budget.units) then
      add({unit = 'budget', per = budget.period, burst = tonumber(budget.units)}, 'budget:' .. budget.period)
    end
    return kind
  end

  -- Return the JSON of a node's settings, the path that has the settings, and whether an operator gave them; nil
  -- without settings.
  function tenants.settings_of(path)
    local all = tenants.paths(path)
    local parent = #all > 1 and all[#all - 1] .. separator or ''
    local names = {path, parent .. '*', string.rep('*' .. separator, #all - 1) .. '*'}
    local changed = read('HMGET', key.tenant_changes, unpack(names))
    local configured = read('HMGET', key.tenants, unpack(names))
    for i, name in ipairs(names) do
      if changed[i] or configured[i] then return changed[i] or configured[i], name, changed[i] and true or false end
    end
  end

  local own_kinds, shared_kinds = {}, {} -- path of settings -> their kind: for the node with this path; for other nodes
  local SERVED = {unit = 'served', name = 'served', code = ''} -- the cost served; only nodes with own settings count it
  SERVED.__index = SERVED

  local function new_balance(node, constants)
    local field = joined(node.path, constants.name)
    local balance = {node = node, field = field, owed = 0, stored = false, stored_ms = 0, changed_in = 0}
    return setmetatable(balance, constants)
  end

  -- The count of a node's former limit on requests in flight: requests that this limit has counted are still in it.
  tenants.FORMER = {unit = 'parallel', per = 0, name = 'parallel'}
  tenants.FORMER.__index = tenants.FORMER
  function tenants.former(path)
    local node = tenants.node(path)
    node.former = node.former or new_balance(node, tenants.FORMER)
    return node.former
  end

  -- A node is the list of its limits and, if it has one, its count `served`.
  function tenants.node(path)
    local node = nodes[path]
    if node then return node end
    local text, from = tenants.settings_of(path)
    local kinds, name = from == path and own_kinds or shared_kinds, from or ''
    local kind = kinds[name] or parse_kind(#tenants.paths(path), text)
    kinds[name] = kind
    node = {path = path, kind = kind, read_in = 0, eased_in = 0}
    for i, constants in ipairs(kind.limits) do node[i] = new_balance(node, constants) end
    if from == path then
      node.served = new_balance(node, SERVED)
      node[#node + 1] = node.served
    end
    nodes[path], nodes_known = node, nodes_known + 1
    return node
  end

  local function add(list, it) list[#list + 1] = it end

  -- The shape of a flow is the list of the constants of its nodes' limits, from the top node down; thousands of flows
  -- share one shape. The field `shown` has the positions of limits on requests and the positions of limits on tokens in
  -- two lists, without empty lists; `charges` and `charges_of_demoted` cache the results of `find_charges` by the field
  -- `charged` of a record.
  local shapes -- the shape of a flow without limits; each shape's `wider` has the shapes with one node more
  local function new_shape(constants)
    local shape = {wider = {}, charges = {}, charges_of_demoted = {}, shown = {}}
    local of_requests, of_tokens = {}, {}
    for i, each in ipairs(constants) do
      shape[i] = each
      if each.rate then add(each.unit == 'requests' and of_requests or of_tokens, i) end
    end
    if of_requests[1] then add(shape.shown, of_requests) end
    if of_tokens[1] then add(shape.shown, of_tokens) end
    return shape
  end

  -- Return the shape of a flow whose path has the nodes of `shape`, followed by `node`.
  local function widened(shape, node)
    local found = shape.wider[node.kind]
    if not found then
      local constants = {unpack(shape)}
      for _, each in ipairs(node.kind.limits) do add(constants, each) end
      if node.served then add(constants, SERVED) end
      found = new_shape(constants)
      shape.wider[node.kind] = found
    end
    return found
  end

  -- Return the positions of request r's limits in lists. `charged`: limits that have charged r; `running`: charged
  -- limits on requests in flight; `uncharged`: limits that have not charged r; `arrive`: uncharged limits that charge
  -- at arrival; `start`: uncharged limits and the counts of the cost served; `restart`: limits and counts that a start
  -- has charged; `former`: levels of nodes whose former limits on requests in flight count r. Nodes that demote do not
  -- charge a demoted request.
  local function find_charges(shape, r)
    local lists = {charged = {}, running = {}, uncharged = {}, arrive = {}, start = {}, restart = {}, former = {}}
    local counted = {}
    for i, constants in ipairs(shape) do
      if constants == SERVED then
        add(lists.start, i)
        add(lists.restart, i)
      elseif string.find(r.charged, constants.code, 1, true) then
        add(lists.charged, i)
        if constants.unit == 'parallel' then
          add(lists.running, i)
          counted[constants.code] = true
        end
        if constants.over_limit == 'queue' then add(lists.restart, i) end
      elseif not (r.demoted == 1 and constants.over_limit == 'demote') then
        add(lists.uncharged, i)
        add(lists.start, i)
        if constants.over_limit ~= 'queue' then add(lists.arrive, i) end
      end
    end
    for code, level in string.gmatch(r.charged, '((%d+)parallel,)') do
      if not counted[code] then add(lists.former, tonumber(level)) end
    end
    return lists
  end

  function tenants.charges(shape, r)
    local known = shape[r.demoted == 1 and 'charges_of_demoted' or 'charges']
    local lists = known[r.charged]
    if not lists then
      lists = find_charges(shape, r)
      known[r.charged] = lists
    end
    return lists
  end

  -- Return a record's field `charged` with the codes of the limits at `positions` added (charged) or, for `sign` -1,
  -- removed (refunded).
  function tenants.charged(shape, charged, positions, sign)
    if positions.after or not positions[1] then return positions.after or charged end
    for i = 1, #positions do
      local code = shape[positions[i]].code
      if sign > 0 then
        charged = charged .. code
      else
        local first, last = string.find(charged, code, 1, true)
        charged = string.sub(charged, 1, first - 1) .. string.sub(charged, last + 1)
      end
    end
    positions.after = charged
    return charged
  end

  -- Return the list of the balances of a flow's nodes, from the top; `nodes` has the nodes that have balances, `shape`
  -- the flow's shape.
  local function find_counting(flow)
    local found, shape = {nodes = {}, shape = shapes, read_in = 0}, shapes
    for _, path in ipairs(tenants.paths(flow)) do
      local node = tenants.node(path)
      if node[1] then
        add(found.nodes, node)
        for _, balance in ipairs(node) do add(found, balance) end
        shape = widened(shape, node)
      end
    end
    found.shape = shape
    tenants.counting[flow] = found
    return found
  end

  -- Drop the cached nodes with their settings, which another library may have changed, and their balances
  -- (lib/quotas.lua). The table `counting` caches the results of `find_counting`, by flow.
  local FIND = {__index = function(_, flow) return find_counting(flow) end}
  function tenants.forget()
    nodes, nodes_known, weights, own_kinds, shared_kinds = {}, 0, {}, {}, {}
    shapes = new_shape({})
    tenants.counting = setmetatable({}, FIND)
  end

  -- Return the weight of a member, within bounds; nil if no node's settings give a weight.
  function tenants.weight(member)
    local weight = weights[member]
    if weight == nil then
      local path = tenants.is_inner(member) and string.sub(member, 1, -2) or member
      local found = tenants.node(path).kind.weight
      weight = found and bands.clamp(found, LEAST_WEIGHT, MOST_WEIGHT) or false
      weights[member] = weight
    end
    return weight or nil
  end

  -- The state of each inner node in a band: the virtual time `v` and the newcomers' tag `new` of its children. States
  -- are cached between calls while only this library changes the pool.
  local states, states_known, changed_states = {}, 0, {} -- band -> node -> {band, node, v, new}; state -> true
  function tenants.state(band, node)
    local of_band = states[band]
    if not of_band then
      of_band = {}
      states[band] = of_band
    end
    local state = of_band[node]
    if not state then
      local text = read('HGET', key.nodes[band], node)
      local valid, v, new = pcall(struct.unpack, 'ddd', text or '')
      state = {band = band, node = node, v = valid and v or 0, new = valid and new or 0}
      of_band[node], states_known = state, states_known + 1
    end
    return state
  end

  local function forget_states() states, states_known, changed_states = {}, 0, {} end

  -- Return up to `count` random fields of a hash, and their values.
  function tenants.random_fields(hash, count)
    if read('HLEN', hash) == 0 then return {}, {} end
    local found = read('HRANDFIELD', hash, count)
    return found, read('HMGET', hash, unpack(found))
  end

  -- For the sweep: forget some of a band's inner nodes, if no request has waited below them for `idle_ms`, and drop
  -- finish tags without effect.
  local MOST_THROTTLED = 1000
  function tenants.drop_idle_nodes(band, count, idle_ms)
    local throttled, is_parent = read('ZRANGE', key.throttled[band], 0, MOST_THROTTLED), {}
    if #throttled > MOST_THROTTLED then return end
    for _, member in ipairs(throttled) do is_parent[tenants.parent(member)] = true end
    local found, texts = tenants.random_fields(key.nodes[band], count)
    for i, node in ipairs(found) do
      local valid, v, _, used_ms = pcall(struct.unpack, 'ddd', texts[i])
      local is_empty = pool[QUEUED[band]] == 0 or read('ZCARD', key.children[band][node]) == 0
      if pool[QUEUED[band]] == 0 then defer_unlink(key.children[band][node]) end -- strays at most
      -- A throttled child of the node keeps its tag, so the node must keep the virtual time of its children.
      if is_empty and not is_parent[node] and not (valid and now_ms - used_ms <= idle_ms) then
        defer_write('HDEL', key.nodes[band], node)
        defer_unlink(key.finished[band][node])
        if states[band] then states[band][node] = nil end
      elseif valid then
        local finished = key.finished[band][node]
        for _, member in ipairs(read('ZRANGEBYSCORE', finished, '-inf', v, 'LIMIT', 0, count)) do
          defer_write('ZREM', finished, member)
        end
      end
    end
  end

  -- Remove the tree of tenants' nodes of a band in which no request waits or runs.
  function tenants.drop_tree(band)
    for _, node in ipairs(read('HKEYS', key.nodes[band])) do
      defer_unlink(key.children[band][node])
      defer_unlink(key.finished[band][node])
    end
    defer_unlink(key.nodes[band])
    forget_states()
  end

  -- Add the keys of a band's inner nodes to `names`; keys with finish tags and virtual times only if `is_lost`.
  function tenants.add_keys(band, names, is_lost)
    for _, node in ipairs(read('HKEYS', key.nodes[band])) do
      names[#names + 1] = key.children[band][node]
      if is_lost then names[#names + 1] = key.finished[band][node] end
    end
    if is_lost then names[#names + 1] = key.nodes[band] end
  end

  function tenants.touch(state) changed_states[state] = true end

  function tenants.commit()
    for state in pairs(changed_states) do
      defer_write('HSET', key.nodes[state.band], state.node, struct.pack('ddd', state.v, state.new, now_ms))
    end
  end

  -- Drop the last call's changes, and the caches that are too large or no longer valid.
  function tenants.reset()
    tenants.use_separator()
    if next(changed_states) then changed_states = {} end
    if not cache_is_valid or states_known > MOST_KNOWN then forget_states() end
    if not cache_is_valid or nodes_known > MOST_KNOWN then tenants.forget() end
  end
end
