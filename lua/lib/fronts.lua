-- include: storage
-- Reads ahead the first members of the sorted sets that dispatch serves from the front: the flow queues of a band; the
-- requests, or heads of lines, of a flow queue; the requests of a line. A front holds members of one set from index
-- `at` on; the field `whole` says whether the set has no other members. In a front without scores, members before `at`
-- were removed. In a front with scores, the table `scores` has the new score of each changed member, or false if the
-- member was removed. This file uses reads and writes from lib/storage.lua. This file defines `read_ahead`.

do -- a block of its own: Lua allows 200 local variables in a chunk
  local expected = 1 -- number of requests that this call may serve

  -- Forget a front and defer its changes as writes, so that later writes come after them. `is_last`: the script call
  -- can no longer fail, so former scores are not needed.
  function read_ahead.discard(name, is_last)
    local front = fronts[name]
    if not front then return end
    fronts[name] = nil
    local scores = front.scores
    if not scores then
      for i = 1, front.at - 1 do defer_write('ZREM', name, front[i]) end
      return
    end
    for i = 1, is_last and 0 or #front, 2 do
      if scores[front[i]] ~= nil then note_original(name, front[i], front[i + 1]) end
    end
    for member, score in pairs(scores) do
      if score then defer_write('ZADD', name, score, member) end
    end
    for member, score in pairs(scores) do
      if not score then defer_write('ZREM', name, member) end
    end
  end

  function read_ahead.expect(count) expected = math.max(count, 1) end -- 0 would make read_scored read the whole set

  -- Read the first `more` + 1 members of a sorted set, without scores. The extra member shows whether the set has more.
  local function read_members(name, more)
    local front = read('ZRANGE', name, 0, more)
    front.at, front.whole = 1, #front <= more
    fronts[name] = front
    return front
  end

  -- Return the first member of a sorted set, or nil.
  function read_ahead.first_member(name)
    local front = fronts[name]
    local member = front and front[front.at]
    if member or (front and front.whole) then return member end
    return read_members(name, 1)[1]
  end

  -- Return the second member of a sorted set, or nil.
  function read_ahead.second_member(name)
    local front = fronts[name]
    if not (front and (front.whole or front[front.at + 1])) then front = read_members(name, 1) end
    return front[front.at + 1]
  end

  -- Append the first `count` members of a sorted set to `found`.
  function read_ahead.first_members(name, count, found)
    local front, known = read_members(name, count), #found
    for i = 1, math.min(count, #front) do found[known + i] = front[i] end
  end

  -- Remove a member of a sorted set. Return whether the set is now empty; nil if the front does not show this.
  function read_ahead.remove(name, member)
    local front = fronts[name]
    if front and front[front.at] == member then
      local at = front.at + 1
      front.at = at
      if front[at] then return false end
      return front.whole or nil
    end
    read_ahead.discard(name)
    defer_write('ZREM', name, member)
    return nil
  end

  -- In a front with scores, `scores` has the new score of each changed member, false if the member left. Changed
  -- members that are part of the front are in the list `back`, in order from `first` to `last`; equal scores are
  -- ordered by member, as in Redis.
  local function precedes(score, member, other_score, other)
    return score < other_score or (score == other_score and member < other)
  end

  local function read_scored(name, most)
    local front = read('ZRANGE', name, 0, most - 1, 'WITHSCORES')
    local count = #front
    for i = 2, count, 2 do front[i] = tonumber(front[i]) end
    front.at, front.whole, front.end_member, front.end_score = 1, count < 2 * most, front[count - 1], front[count]
    front.back, front.scores, front.first, front.last = {}, {}, 1, 0
    fronts[name] = front
    return front
  end

  -- Return the front as it was read, at most `most` members: member, score, member, score ... The caller must not
  -- change the list.
  function read_ahead.scored_front(name, most)
    local front = fronts[name]
    if front and (front.whole or front[front.at] or front.back[front.first]) then return front end
    return read_scored(name, most or expected)
  end

  -- Return the first member of a sorted set and its score, or nil.
  function read_ahead.first_scored(name)
    local front = fronts[name]
    if not (front and front[front.at]) then front = read_ahead.scored_front(name) end
    local at, other = front.at, front.back[front.first]
    local member, score = front[at], front[at + 1]
    if not other then return member, score end
    local other_score = front.scores[other]
    if member and precedes(score, member, other_score, other) then return member, score end
    return other, other_score
  end

  local function take_from_back(front, member)
    local back, last = front.back, front.last
    for i = front.first, last do
      if back[i] == member then
        for following = i, last do back[following] = back[following + 1] end
        front.last = last - 1
        return
      end
    end
  end

  -- Set the score of a sorted set's new or present member; the score nil removes the member.
  function read_ahead.set_score(name, member, score)
    local front = fronts[name]
    if not front then
      if score then defer_write('ZADD', name, score, member) else defer_write('ZREM', name, member) end
      return
    end
    local scores, back, at = front.scores, front.back, front.at
    if back[front.first] == member then
      front.first = front.first + 1
    elseif scores[member] then
      take_from_back(front, member)
    end
    scores[member] = score or false
    while front[at] and scores[front[at]] ~= nil do at = at + 2 end
    front.at = at
    if not score or not (front.whole or precedes(score, member, front.end_score, front.end_member)) then return end
    local first, last = front.first, front.last
    local i = last
    while i >= first and precedes(score, member, scores[back[i]], back[i]) do
      back[i + 1] = back[i]
      i = i - 1
    end
    back[i + 1], front.last = member, last + 1
  end
end
