-- include: outliers
-- Mark endpoints as drained or down, or remove the mark; what now fits is dispatched.
--
-- Guarantees: nothing new goes to a marked endpoint from now on, whichever replica chooses; what runs there ends there.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then for each endpoint: address, mark, on (1 or 0). The mark: drained, down; ejected: an
--   ejected endpoint was probed, and is not (1) or is (0) well; stuck: its page stands still while requests run there
--
-- Returns {epoch, notifications, attempts, served, reply...}: 'marked' | 'ejected' (stuck) | 'unknown' (no such
-- endpoint is published, or is ejected)

local function mark_endpoint(args)
  return for_each_item(args, ITEM.mark_endpoint, function(_, address, what, on)
    local done
    if what == 'ejected' then
      done = outliers.probed(address, on == '0')
    elseif what == 'stuck' then
      if outliers.stuck(address, on == '1') then return 'ejected' end
      done = true
    else
      done = endpoints.mark(what, on == '1', address)
    end
    return done and 'marked' or 'unknown'
  end)
end
