-- include: dispatch
-- Take requests back on behalf of the stream that brought them.
--
-- Guarantees: only the owner's current attempt can cancel, so that a late cancel from a replica that has
-- lost a request never harms its adopter (G7); repeating a call changes nothing (G6). An expiry does not
-- take a grant away that was given in time (G5).
--
-- KEYS[1] epp:{POOL}:pool
-- ARGV[1] the calling replica; then for each request: id, attempt, why (cancelled | expired | withdrawn)
-- Returns {born, news, attempts, served, reply...}: 'ended' | 'granted' (expiry only) | 'foreign' | 'unknown'
local ITEM = 3
news.caller = ARGV[1]
local replies = {}
for at = 2, #ARGV, ITEM do
  local id, attempt, why = unpack(ARGV, at, at + ITEM - 1)
  local r, reply = record.read(id), 'unknown'
  if r then
    if r.owner ~= news.caller or r.attempt ~= attempt then
      reply = 'foreign'
    elseif why == 'expired' and (r.state == 'granted' or r.state == 'placed') then
      reply = 'granted'
    else
      finish_request(r, why)
      reply = 'ended'
    end
  end
  replies[#replies + 1] = reply
end
local born, mine, attempts, served = conclude()
return {born, mine, attempts, served, unpack(replies)}
