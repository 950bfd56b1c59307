-- include: dispatch
-- Cancel requests, at the demand of the replica whose stream brought them.
--
-- Guarantees: only the owner's current attempt can cancel, so a late cancel of a former owner never ends an adopted
-- request (G7). A request that was placed before another stream took it over cannot be cancelled. Repeating a call
-- changes nothing (G6). An expiry does not end a request that was granted in time (G5). The reason `unclaimed` ends
-- only a grant whose endpoint the caller does not know yet. If a failover loses Redis's last writes, the queue may
-- grant a request again that was already served: `unclaimed` releases that grant's stock before its lease ends.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica; then for each request: id, attempt, why (cancelled | expired | withdrawn);
--   or id, '', 'unclaimed': the caller was notified of a grant, but no stream of the caller waits for it
--
-- Returns {epoch, notifications, attempts, served, reply...}: 'ended' | 'foreign' | 'unknown'; for an expiry also
--   'expired' in place of 'ended', or the refusal of the tenant's limit for which the request waited (as in admit.lua)
--   | 'granted'

local function cancel(args)
  record.prefetch(column(args, ITEM.cancel, 1))
  return for_each_item(args, ITEM.cancel, function(_, id, attempt, why)
    local r = record.read(id)
    if not r then -- if a request expired in another call, the notification may name a tenant's limit
      local note = why == NOTIFY_EXPIRED and settings.tenants and read('HGET', key.inbox[notifications.caller], id)
      return note and string.match(note, '^(' .. NOTIFY_REFUSED .. ' .*)\31$') or 'unknown'
    end
    if why == 'unclaimed' then
      if r.owner ~= notifications.caller or not notifications.is_untaken(r) then return 'foreign' end
      why = 'withdrawn'
    elseif r.owner ~= notifications.caller or r.attempt ~= attempt then
      return 'foreign'
    elseif why == 'expired' and not record.is_waiting(r) then
      return 'granted'
    end
    local reply = 'ended'
    if why == NOTIFY_EXPIRED then reply = expire(r) else finish_request(r, why) end
    notifications.withdraw(r.owner, id)
    return reply
  end)
end
