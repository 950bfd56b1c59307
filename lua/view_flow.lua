-- include: view
-- One lane, in each band where it has waiting requests. Reads only.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the lane
-- Returns {now_us, row...}, as view_flows has them
local function view_flow(args)
  local reply = {full(now_us)}
  for group = 0, 5 do
    local tag = redis.call('ZSCORE', view.lanes(group), args[1])
    if tag then view.add_lanes(reply, group, {args[1], tag}) end
  end
  return reply
end
