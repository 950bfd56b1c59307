-- include: writes
-- What dispatch takes from the front of sorted sets, read ahead: of a band's lanes, and of a lane's requests, as
-- many as it may serve. What it changes is put off (lib/writes.lua). Whoever else reads such a set, or changes
-- it in another way, asks `anew` for its key: what was put off is then written, and what was read is forgotten.
local ahead = {}
local expected = 1 -- how many may be served
local fronts = {} -- key -> what was read: members from `at` on; `whole` if there are no more
local function forget_fronts()
  expected = 1
  if next(fronts) then fronts = {} end
end
function ahead.expect(count) expected = math.max(count, 1) end -- of 0, all would be read
-- What has left a front of members leaves Redis by its rank: all that stood before `at`. What has moved,
-- maybe several times, takes the last of its scores (false: it left).
local scored_members, gone_members = {}, {} -- filled again by each call
local function give_front(name, front)
  local scores = front.scores
  if not scores then
    if front.at > 1 then redis.call('ZREMRANGEBYRANK', name, 0, front.at - 2) end
    front.at = 1
    return
  end
  local moved, gone = 0, 0
  for member, score in pairs(scores) do
    if score then
      scored_members[moved + 1], scored_members[moved + 2] = score, member
      moved = moved + 2
    else
      gone = gone + 1
      gone_members[gone] = member
    end
  end
  write_all('ZADD', name, scored_members, moved)
  write_all('ZREM', name, gone_members, gone)
end
-- In the middle of a call: what stood there is remembered, as by `send`.
function ahead.forget(name)
  local front = fronts[name]
  if not front then return end
  if front.scores then
    for i = 1, front.at - 1, 2 do remember(name, front[i], front[i + 1]) end
  elseif front.at > 1 then
    remember_all('ZREM', name, front, front.at - 1)
  end
  fronts[name] = nil
  give_front(name, front)
end
function ahead.anew(name)
  if fronts[name] then ahead.forget(name) end
  if waiting[name] then send(name) end
  return name
end
function ahead.save()
  for name, front in pairs(fronts) do
    give_front(name, front)
    fronts[name] = nil
  end
end
-- Of members that only ever leave: the first. One more than is asked for is read, to know whether it is the last.
local function read_members(name, more)
  local front = redis.call('ZRANGE', ahead.anew(name), 0, more)
  front.at, front.whole = 1, #front <= more
  fronts[name] = front
  return front
end
function ahead.member(name)
  local front = fronts[name]
  local member = front and front[front.at]
  if member or (front and front.whole) then return member end
  return read_members(name, 1)[1]
end
-- The first `count`, at the end of `found`.
function ahead.members(name, count, found)
  local front, known = read_members(name, count), #found
  for i = 1, math.min(count, #front) do found[known + i] = front[i] end
end
-- It leaves. Returns whether it was the last, if that is known.
function ahead.leave(name, member)
  local front = fronts[name]
  if front and front[front.at] == member then
    local at = front.at + 1
    front.at = at
    if front[at] then return false end
    return front.whole or nil
  end
  ahead.forget(name)
  later('ZREM', name, member)
  return nil
end
-- Of members that come back with a higher score: the first, and its score. Those that have come back stand in
-- `back` from `first` to `last`, and their scores in `scores`; equals go by name, as in Redis.
local function precedes(score, member, other_score, other)
  return score < other_score or (score == other_score and member < other)
end
local function read_scored(name)
  local front = redis.call('ZRANGE', ahead.anew(name), 0, expected - 1, 'WITHSCORES')
  local count = #front
  for i = 2, count, 2 do front[i] = tonumber(front[i]) end
  front.at, front.whole, front.end_member, front.end_score = 1, count < 2 * expected, front[count - 1], front[count]
  front.back, front.scores, front.first, front.last = {}, {}, 1, 0
  fronts[name] = front
  return front
end
-- What was read: member, score, and so on.
function ahead.front(name)
  local front = fronts[name]
  if front and (front.whole or front[front.at] or front.back[front.first]) then return front end
  return read_scored(name)
end
function ahead.scored(name)
  local front = fronts[name]
  if not (front and front[front.at]) then front = ahead.front(name) end
  local at, other = front.at, front.back[front.first]
  local member, score = front[at], front[at + 1]
  if not other then return member, score end
  local other_score = front.scores[other]
  if member and precedes(score, member, other_score, other) then return member, score end
  return other, other_score
end
-- The first comes back with `score`, or leaves: nil.
function ahead.move(name, member, score)
  local front = fronts[name]
  if front and front[front.at] == member then
    front.at = front.at + 2
  elseif front and front.back[front.first] == member then
    front.first = front.first + 1
  else
    ahead.forget(name)
    if score then later('ZADD', name, score, member) else later('ZREM', name, member) end
    return
  end
  local scores, first, last = front.scores, front.first, front.last
  scores[member] = score or false
  if not score or not (front.whole or precedes(score, member, front.end_score, front.end_member)) then return end
  local back = front.back
  local i = last
  while i >= first and precedes(score, member, scores[back[i]], back[i]) do
    back[i + 1] = back[i]
    i = i - 1
  end
  back[i + 1], front.last = member, last + 1
end
