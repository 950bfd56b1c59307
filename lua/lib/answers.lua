-- include: pool
-- Keeps the mean length of each flow's answers, in tokens, as the estimate for requests that set no maximum.
-- Uses reads and writes from lib/storage.lua, settings from lib/pool.lua. Defines `answers`.

local answers = {has_learned = false}
do
  -- Return a flow's mean answer length and the time of its last answer; nil if the entry is damaged (a stray).
  local function parse_answer(text)
    local known, mean, last_ms = pcall(struct.unpack, 'dd', text)
    if known and mean == mean and mean >= 0 then return mean, last_ms end
    strays = strays + 1
  end

  function answers.mean(flow)
    local text = read('HGET', key.answers, flow)
    return text and parse_answer(text) or settings.default_answer
  end

  local learned, new_flows = {}, 0 -- flow -> the entry that this call has changed; the number of new flows
  function answers.reset() learned, new_flows, answers.has_learned = {}, 0, false end

  function answers.learn(flow, tokens)
    local text = learned[flow] or redis.call('HGET', key.answers, flow)
    local most = settings.max_workloads
    if not text then
      if most and redis.call('HLEN', key.answers) + new_flows >= most then return end
      new_flows = new_flows + 1
    end
    local mean = text and parse_answer(text)
    mean = mean and pool.smoothed(mean, tokens, settings.answer_alpha) or tokens
    learned[flow], answers.has_learned = struct.pack('dd', mean, now_ms), true
    defer_write('HSET', key.answers, flow, learned[flow])
  end

  function answers.drop(flow) defer_write('HDEL', key.answers, flow) end
  function answers.idle(text, idle_ms)
    local mean, last_ms = parse_answer(text)
    return not mean or now_ms - last_ms > idle_ms
  end
end
