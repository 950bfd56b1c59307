-- include: dispatch
-- Add the usage that one replica has counted to the fleet's usage of an hour, by leaf (flow) and model.
--
-- Guarantees: a batch counts once, however often its replica sends the batch. An hour keeps at most MOST_ROWS rows; one
-- more row, with an empty leaf and model, sums all other leaves. Beyond MOST_IN_ALL rows, and after KEPT_HOURS, the
-- oldest hours are removed.
--
-- keys[1] epp:{POOL}:pool
-- args[1] the calling replica
-- args[2] the batch's number: a replica sends its next batch for an hour only after the reply to the last
-- args[3] the hour, in hours since 1970
-- args[4] 1: the replica stops after this batch; else 0
-- args[5] the hour of the replica's batch before this one; 0 if there is none
-- args[6] and further: for each row leaf, model, then the figures of `Usage` (picker_fleet/state/reads.py)
--
-- Returns 'counted', or 'known' for a repeated batch; in either case stores `args[2] TIME_MS args[4]` for the replica.
-- If Redis has lost the replica's batch before this one, the call stores for the replica '' when it noticed the loss.

local ROW, FIRST, FIGURES = 8, 6, 6
local MOST_ROWS = 100000
local MOST_IN_ALL = 1000000
local KEPT_HOURS = 840
local OTHERS = joined('', '')
local function parse_usage(text)
  local figures = {}
  for figure in string.gmatch(text or '', '%S+') do figures[#figures + 1] = tonumber(figure) end
  for i = #figures + 1, FIGURES do figures[i] = 0 end
  return figures
end

-- Add the usage rows in `args` to the hash `name`, the usage of one hour. Return the number of new rows.
local function add_usage(name, args, length)
  local fields, sums, added = {}, {}, 0
  for at = FIRST, #args, ROW do fields[#fields + 1] = joined(args[at], args[at + 1]) end
  local found = #fields > 0 and read('HMGET', name, unpack(fields)) or {}
  for i, field in ipairs(fields) do
    local text = found[i]
    if not text and length + added >= MOST_ROWS then
      field = OTHERS
      text = not sums[OTHERS] and read('HGET', name, OTHERS)
    end
    if not text and not sums[field] then added = added + 1 end
    sums[field] = sums[field] or parse_usage(text)
    for n = 1, FIGURES do sums[field][n] = sums[field][n] + tonumber(args[FIRST + (i - 1) * ROW + 1 + n]) end
  end
  for field, figures in pairs(sums) do
    for n = 1, FIGURES do figures[n] = exact(figures[n]) end
    defer_write('HSET', name, field, table.concat(figures, ' '))
  end
  return added
end

-- Store that the usage of the hour has `rows` rows. Remove the oldest hours while all hours together have more than
-- MOST_IN_ALL rows, and hours older than KEPT_HOURS.
local function note_usage_hour(hour, rows)
  local found, hours, total = read('HGETALL', key.usage_hours), {}, rows
  for i = 1, #found, 2 do
    if found[i] ~= hour then
      hours[#hours + 1] = {tonumber(found[i]), tonumber(found[i + 1])}
      total = total + found[i + 1]
    end
  end
  table.sort(hours, function(a, b) return a[1] < b[1] end)
  local oldest = now_ms / 3600000 - KEPT_HOURS
  for _, each in ipairs(hours) do
    if each[1] >= oldest and total <= MOST_IN_ALL then break end
    total = total - each[2]
    defer_write('HDEL', key.usage_hours, exact(each[1]))
    defer_unlink(key.usage(exact(each[1])))
  end
  defer_write('HSET', key.usage_hours, hour, rows)
end

local function count_usage(args)
  local hour, mark = args[3], '\30' .. args[1]
  local name = key.usage(hour)
  local last, rows = read('HGET', name, mark), read('HLEN', name)
  local known = last and string.match(last, '^%S+') == args[2]
  local former = args[5] == hour and last or read('HGET', key.usage(args[5]), mark)
  local has_lost = tonumber(string.match(former or '', '^%d+') or 0) < args[2] - 1
  if not last then rows = rows + 1 end
  if not known then rows = rows + add_usage(name, args, rows) end
  defer_write('HSET', name, mark, args[2] .. ' ' .. exact(now_ms) .. ' ' .. args[4])
  if has_lost then defer_write('HSET', name, '\30', '0 ' .. exact(now_ms) .. ' 1') end
  if tonumber(read('HGET', key.usage_hours, hour) or 0) ~= rows then note_usage_hour(hour, rows) end
  commit_writes()
  return known and 'known' or 'counted'
end
