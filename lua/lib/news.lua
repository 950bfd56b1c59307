-- include: writes
-- News for the replicas that own requests: durable in each one's inbox until taken, with a wake-up as a
-- hint. News for the calling replica goes home in the script's own reply instead of a wake-up.
local news = {}
function news.tell(owner, id, what)
  -- Only a live replica is granted anything; an inbox of one that is gone would never be emptied.
  if what == 'granted' or redis.call('ZSCORE', key.replicas, owner) then
    later('HSET', key.inbox[owner], id, what)
  end
  local mine = news.mine
  if owner == news.caller then
    mine[#mine + 1] = what .. ' ' .. id
  else
    local text = news.others[owner]
    news.others[owner] = (text and text .. '\n' or '') .. what .. ' ' .. id
  end
end
function news.forget(owner, id) later('HDEL', key.inbox[owner], id) end
function news.send()
  for owner, text in pairs(news.others) do redis.call('PUBLISH', key.wake(owner), text) end
end
news.mine, news.others = {}, {}
local function forget_news(caller)
  news.caller = caller
  if news.mine[1] then news.mine = {} end
  if next(news.others) then news.others = {} end
end
