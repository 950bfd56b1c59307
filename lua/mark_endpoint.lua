-- include: outliers
-- Set or remove marks of endpoints, then dispatch queued requests.
--
-- Guarantees: an endpoint marked drained or down gets no new requests; its running requests continue.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then for each endpoint: address, mark, on (1 or 0). Marks: drained; down; ejected: a
--   probe of an ejected endpoint has failed (1) or succeeded (0); stuck: the endpoint's requests in flight are old and
--   its metrics page is unchanged (1), or not (0)
-- Returns {epoch, notifications, attempts, served, reply...}: 'marked' | 'ejected' (was stuck) | 'unknown' (no such
-- endpoint is published; for the mark `ejected`: or the endpoint is not ejected)

local function mark_endpoint(args)
  return for_each_item(args, ITEM.mark_endpoint, function(_, address, what, on)
    local done
    if what == 'ejected' then
      done = outliers.probed(address, on == '0')
    elseif what == 'stuck' then
      if outliers.stuck(address, on == '1') then return 'ejected' end
      done = true
    else
      done = marks.set(what, on == '1', address)
    end
    return done and 'marked' or 'unknown'
  end)
end
