-- include: view
-- Lanes with waiting requests, a page of them: those in the order of their start tags, band by band, then
-- those whose flow is at its limit. Reads only.
--
-- Guarantees: at most VIEW_LIMIT rows a call; of a walk by pages, a lane that stays where it is comes once.
--
-- keys[1] epp:{POOL}:pool
-- args[1] group to begin with: the band, or the band + 3 for the parked ones
-- args[2] start tag and args[3] lane behind which to begin; '' and '': the first of the group
-- args[4] rows wanted   args[5] the only band, '' all
-- Returns {now_us, {lanes of groups 0 to 5}, row...}; a row: group, lane, start tag, queued, arrival of the
--   oldest (us), weight, share (what serving one adds to the tag), in flight ('': not counted)
local function view_flows(args)
  local first, score, member, wanted, only = tonumber(args[1]), args[2], args[3], view.count(args[4]), args[5]
  local totals = {}
  local reply = {full(now_us), totals}
  for group = 0, 5 do
    local sorted = view.lanes(group)
    totals[group + 1] = redis.call('ZCARD', sorted)
    if group >= first and wanted > 0 and totals[group + 1] > 0 and (only == '' or tonumber(only) == group % 3) then
      local from = group == first and view.behind(sorted, score, member) or 0
      local lanes = redis.call('ZRANGE', sorted, from, from + wanted - 1, 'WITHSCORES')
      view.add_lanes(reply, group, lanes)
      wanted = wanted - #lanes / 2
    end
  end
  return reply
end
