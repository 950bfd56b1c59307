-- include: dispatch
-- Store which endpoint has the state of an id (of a response or a conversation, in the Responses API), so that requests
-- that name the id go to that endpoint. If an id is stored again, as after the restart of a server, the last endpoint
-- counts.
--
-- Guarantees: the script changes no other state. The sweep drops old ids.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then for each id: id, endpoint
--
-- Returns {epoch, notifications, attempts, served, reply...}: 'noted'

local function note_origin(args)
  return for_each_item(args, ITEM.note_origin, function(_, id, endpoint)
    defer_write('HSET', key.origins, id, endpoint)
    defer_write('ZADD', key.origin_times, now_ms, id)
    return 'noted'
  end)
end
