-- include: dispatch
-- A replica reports that it is alive, and reads the state of the fleet: the pool's epoch, which replica publishes, the
-- bounds, and the notifications that a lost wake-up has left in its inbox.
--
-- Guarantees: a notification other than a grant is in exactly one heartbeat's reply, even if the replica has already
-- read it elsewhere, and in none if a new request uses the id. Replies repeat a grant until the request is placed or,
-- if the grant placed it, until the replica acknowledges the endpoint.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica
-- args[2] its replica info, JSON; '': as in its last heartbeat
-- args[3] silence_ms: a replica without a heartbeat for this long counts as gone
-- args[4] signing keys it offers (state/accounting_token.py), separated by blanks: a new key, then the keys it holds
-- args[5] the variant key that it knows, '' for none
-- args[6] and args[7] the epoch and the now_us that its last heartbeat returned; the replica adds to now_us the time
--   since then, by its monotonic clock; none: unknown
--
-- Returns {epoch, notifications, attempts, served, was_known (0: the replica was silent, is new, or its info was lost),
--   leader (1: it publishes), live replicas, config version, endpoints version ('VERSION+MARKS' once there were marks),
--   tuned version, stock, queued, upper, lower, ready, paused (0 or 1), the fleet's signing keys, now_us, the variant
--   key}; numbers that may have fractions are strings. Like every function, it changes nothing in a
--   pool of another format and fails with 'FORMAT N' (N: the pool's format, 'none' if it has none).

-- The most notifications in the reply to one heartbeat; the replies to the replica's next heartbeats carry the rest.
local INBOX_LIMIT = 256
local function read_inbox(inbox)
  local count = read('HLEN', inbox)
  if count == 0 then return {} end
  if count <= INBOX_LIMIT then return read('HGETALL', inbox) end
  return read('HRANDFIELD', inbox, INBOX_LIMIT, 'WITHVALUES')
end

-- Return the fleet's signing keys, newest first; a new key is added each day. Replicas keep and offer the keys, so a
-- pool that was lost gets its keys back. A signature is valid for at least six days.
local KEY_LIFE_MS = 86400000
local KEYS_KEPT = 8
local function merge_signing_keys(kept, offered)
  local keys, known, since_ms, fresh = {}, {}, nil, nil
  for word in string.gmatch(kept or '', '%S+') do
    if since_ms then keys[#keys + 1], known[word] = word, true else since_ms = tonumber(word) end
  end
  for word in string.gmatch(offered, '%S+') do
    if not fresh then
      fresh = word
    elseif not known[word] and #keys < KEYS_KEPT then
      keys[#keys + 1], known[word] = word, true
    end
  end
  since_ms = since_ms or now_ms
  if fresh and (#keys == 0 or now_ms - since_ms >= KEY_LIFE_MS) then
    table.insert(keys, 1, fresh)
    keys[KEYS_KEPT + 1], since_ms = nil, now_ms
  end
  local text = table.concat(keys, ' ')
  local stored = exact(since_ms) .. ' ' .. text
  if text ~= '' and stored ~= kept then defer_write('HSET', key.pool, 'signing_keys', stored) end
  return text
end

-- Return the key that chooses variants of models (ingress/traffic_split.py): 'TIME:KEY', the first signing key ever
-- offered and the time of the offer. Replicas keep and offer the variant key, and the oldest variant key wins, so a
-- pool that was lost gets its own key back even if a new replica reports first.
local function merge_variant_key(kept, known, fresh)
  local oldest = kept or fresh and exact(now_ms) .. ':' .. fresh
  if known ~= '' and (not kept or known < kept) then oldest = known end
  if oldest ~= kept then defer_write('HSET', key.pool, 'variant_key', oldest) end
  return oldest or ''
end

-- Return {count, least}: the number of live replicas and the least of their ids. The list of replicas is read if their
-- number has changed, if a replica joins, and once a second, since a library of another version may have added a
-- replica. Other calls only count the replicas, so their cost does not grow with the fleet.
local READ_AFTER_MS = 1000
local function live_replicas(joins, silence_ms)
  local known, since = key.live, '(' .. (now_ms - silence_ms)
  local age_ms = known and now_ms - known.read_ms
  if known and not joins and age_ms >= 0 and age_ms < READ_AFTER_MS
    and read('ZCOUNT', key.replicas, since, '+inf') == known.count then
    return known
  end
  local found, least = read('ZRANGEBYSCORE', key.replicas, since, '+inf'), nil
  for i = 1, #found do
    if not least or found[i] < least then least = found[i] end
  end
  key.live = {count = #found, least = least, read_ms = now_ms}
  return key.live
end

local function heartbeat(args)
  local owner, replica_info, silence_ms = args[1], args[2], tonumber(args[3])
  if args[6] and args[6] == exact(pool.epoch) then advance_clock(tonumber(args[7])) end
  reset_notifications(owner)
  pool.create()
  local last = read('ZSCORE', key.replicas, owner)
  note_original(key.replicas, owner, last)
  last = tonumber(last or 0)
  local was_silent = last <= now_ms - silence_ms
  local is_info_lost = replica_info == '' and read('HEXISTS', key.replica_info, owner) == 0
  local was_known = (was_silent or is_info_lost) and 0 or 1
  defer_write('ZADD', key.replicas, now_ms, owner)
  if replica_info ~= '' then defer_write('HSET', key.replica_info, owner, replica_info) end
  -- Drop the cursor of a sweep that has begun to orphan the replica's requests: the next scan must restart.
  if was_silent then
    defer_write('HDEL', key.orphan_cursors, owner)
    if args[6] then pool.note_possible_loss() end -- the replica is not new: it may report lost records
  end
  local members = live_replicas(was_silent, silence_ms)
  local versions = read('HMGET', key.pool, 'config_version', 'endpoints_version', 'tuned_version',
    'marks_version', 'signing_keys', 'variant_key')
  local inbox, left, ids = read_inbox(key.inbox[owner]), {}, {}
  for i = 1, #inbox, 2 do ids[#ids + 1] = inbox[i] end
  record.prefetch(ids, #ids)
  for i, id in ipairs(ids) do
    local r, note = record.read(id), inbox[2 * i]
    local is_grant = note == NOTIFY_GRANTED or string.sub(note, 1, #NOTIFY_PLACED) == NOTIFY_PLACED
    if is_grant and r and r.owner == owner and notifications.is_untaken(r, note) then
      left[#left + 1] = 'granted ' .. id -- the notification stays until the script place removes it
    else
      if note == NOTIFY_GRANTED then strays = strays + 1 end
      if not is_grant and not r then left[#left + 1] = note .. ' ' .. id end
      notifications.withdraw(owner, id)
    end
  end
  local offered = args[4] or ''
  local signing_keys = merge_signing_keys(versions[5], offered)
  local variant_key = merge_variant_key(versions[6] or nil, args[5] or '', string.match(offered, '%S+'))
  local head = finish_call()
  for _, item in ipairs(head[2]) do left[#left + 1] = item end
  return {
    head[1], left, head[3], head[4], was_known, members.least == owner and 1 or 0, members.count, versions[1] or '',
    (versions[2] or '') .. (versions[4] and '+' .. versions[4] or ''),
    versions[3] or '', exact(pool.stock), pool.queued, exact(pool.upper), exact(pool.lower), pool.ready,
    settings.paused or 0, signing_keys, exact(now_us), variant_key,
  }
end
