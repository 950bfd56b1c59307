-- include: pool
-- Learns from the usage that engines report: the mean length of answers, and the tokens of prompts by their size.
-- Uses reads and writes from lib/storage.lua, settings from lib/pool.lua. Defines `usage`.

local usage = {has_learned = false}
do -- a block of its own: Lua allows 200 local variables in a chunk
  -- Answers: the mean length in tokens, of each model and of each flow and model, as the estimate for requests that set
  -- no maximum.
  local new_answers, new_fields = {}, 0 -- field -> the entry that this call has changed; the number of new fields

  -- Return an entry's mean and the time of its last answer; nil if the entry is damaged (a stray).
  local function parse_answer(text)
    local known, mean, last_ms = pcall(struct.unpack, 'dd', text)
    if known and mean == mean and mean >= 0 then return mean, last_ms end
    strays = strays + 1
  end

  local function mean_of(field)
    local text = read('HGET', key.answers, field)
    return text and parse_answer(text)
  end

  function usage.mean_answer(flow, model)
    return flow ~= model and mean_of(joined(flow, model)) or mean_of(model) or settings.default_answer
  end

  local function learn_mean(field, tokens)
    local text = new_answers[field] or redis.call('HGET', key.answers, field)
    local most = settings.max_workloads
    if not text then
      if most and redis.call('HLEN', key.answers) + new_fields >= most then return end
      new_fields = new_fields + 1
    end
    local mean = text and parse_answer(text)
    mean = mean and pool.smoothed(mean, tokens, settings.answer_alpha) or tokens
    new_answers[field], usage.has_learned = struct.pack('dd', mean, now_ms), true
    defer_write('HSET', key.answers, field, new_answers[field])
  end

  function usage.learn_answer(flow, model, tokens)
    learn_mean(model, tokens)
    if flow ~= model then learn_mean(joined(flow, model), tokens) end
  end

  function usage.drop(field) defer_write('HDEL', key.answers, field) end
  function usage.idle(text, idle_ms)
    local mean, last_ms = parse_answer(text)
    return not mean or now_ms - last_ms > idle_ms
  end

  -- Prompts: a prompt of a size (ingress/cost.py) has about base + slope * size tokens. Each model has its own line,
  -- fitted by least squares of the relative error: with u = 1 / size and v = tokens / size, v is about slope + base *
  -- u. An entry has the number of requests, and moving averages of u, v, u * u and u * v.
  local MOST_MODELS = 256 -- a further model replaces a random model
  local LEAST_SIZE = 16 -- smaller prompts teach nothing: their base outweighs the text
  local SPAN = 50 -- number of requests that the moving averages span
  local LEAST_BASE, MOST_BASE, LEAST_SLOPE, MOST_SLOPE = -64, 2000, 0.02, 2
  local RIDGE = 0.01 -- if sizes hardly differ, the base is near 0
  local EXTREME = 2 -- tokens count as at most twice the estimate, and at least half of it
  -- A new model starts with averages as of five requests with sizes of about 100 and 1000, and size / 4 tokens.
  local NEW_N, NEW_U, NEW_V, NEW_UU, NEW_UV = 5, 0.0055, 0.25, 5.05e-5, 0.0055 * 0.25

  local new_prompts = {} -- model -> the entry that this call has changed

  -- Return a model's entry of prompt costs. If the stored text is damaged (a stray), return a new entry.
  local function parse_prompts(text)
    local known, n, u, v, uu, uv = pcall(struct.unpack, 'ddddd', text)
    local is_valid = known and n >= NEW_N and u > 0 and v > 0 and uu > 0 and uv > 0 and u + v + uu + uv < MOST_COST
    if is_valid then return {n, u, v, uu, uv} end
    strays = strays + 1
    return {NEW_N, NEW_U, NEW_V, NEW_UU, NEW_UV}
  end

  local function line_of(entry)
    local u, v, uu, uv = entry[2], entry[3], entry[4], entry[5]
    local base = (uv - u * v) / (uu - (1 - RIDGE) * u * u)
    base = math.max(LEAST_BASE, math.min(MOST_BASE, base))
    return base, math.max(LEAST_SLOPE, math.min(MOST_SLOPE, v - base * u))
  end

  local function entry_of(model)
    local text = redis.call('HGET', key.prompts, model)
    if text then return parse_prompts(text) end
    if redis.call('HLEN', key.prompts) >= MOST_MODELS then
      defer_write('HDEL', key.prompts, redis.call('HRANDFIELD', key.prompts))
    end
    return {NEW_N, NEW_U, NEW_V, NEW_UU, NEW_UV}
  end

  function usage.learn_prompt(model, size, tokens)
    if not (size >= LEAST_SIZE and tokens >= 1) then return end
    local entry = new_prompts[model] or entry_of(model)
    local base, slope = line_of(entry)
    local expected = math.max(1, base + slope * size)
    if entry[1] >= SPAN / 2 then tokens = math.max(expected / EXTREME, math.min(expected * EXTREME, tokens)) end
    local n, u, v = math.min(entry[1] + 1, SPAN), 1 / size, tokens / size
    entry[1] = n
    entry[2], entry[3] = entry[2] + (u - entry[2]) / n, entry[3] + (v - entry[3]) / n
    entry[4], entry[5] = entry[4] + (u * u - entry[4]) / n, entry[5] + (u * v - entry[5]) / n
    new_prompts[model], usage.has_learned = entry, true
    defer_write('HSET', key.prompts, model, struct.pack('ddddd', unpack(entry)))
  end

  -- Return for each model its name, and the base and slope that estimate a prompt's tokens from its size, as one list.
  function usage.prompt_lines()
    local found, lines = read('HGETALL', key.prompts), {}
    for i = 1, #found, 2 do
      local base, slope = line_of(parse_prompts(found[i + 1]))
      lines[#lines + 1], lines[#lines + 2], lines[#lines + 3] = found[i], exact(base), exact(slope)
    end
    return lines
  end

  function usage.reset() usage.has_learned, new_answers, new_fields, new_prompts = false, {}, 0, {} end
end
