-- include: dispatch
-- A replica acknowledges that it has read the endpoints of requests which their grant has placed (lib/dispatch.lua):
-- remove the notifications of these requests from the replica's inbox.
--
-- Guarantees: the notification of another attempt of a request stays. Repeating a call changes nothing.
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
