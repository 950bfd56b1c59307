-- include: dispatch
-- Remove from the calling replica's inbox the notifications of requests that their grant has placed (lib/dispatch.lua),
-- since the replica has read the requests' endpoints.
--
-- Guarantees: a notification of another attempt stays. Repeating a call changes nothing.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then for each request: id, attempt
--
-- Returns {epoch, notifications, attempts, served, reply...}: 'taken' | 'unknown'

local function acknowledge(args)
  local inbox, notes = key.inbox[args[1]], {}
  local ids, count = column(args, ITEM.acknowledge, 1)
  for i, note in ipairs(read('HMGET', inbox, unpack(ids, 1, count))) do notes[ids[i]] = note end
  return for_each_item(args, ITEM.acknowledge, function(_, id, attempt)
    if notes[id] ~= notifications.placed_for(attempt) then return 'unknown' end
    notifications.withdraw(args[1], id)
    return 'taken'
  end)
end
