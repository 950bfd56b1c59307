-- include: pool
-- What a flow's answers cost on average, in tokens: the estimate for a request that sets no maximum.
local answers = {}
do
  -- One that can't be read is a stray, and is learned anew.
  local function parse_answer(text)
    local known, mean, last_ms = pcall(struct.unpack, 'dd', text)
    if known and mean == mean and mean >= 0 then return mean, last_ms end
    strays = strays + 1
  end
  function answers.mean(flow)
    local text = redis.call('HGET', key.answers, flow)
    return text and parse_answer(text) or settings.default_answer
  end
  local learned, learned_by, new_flows -- flow -> what this call has made of it; the call; new flows
  function answers.learn(flow, tokens)
    if learned_by ~= call_number then learned, learned_by, new_flows = {}, call_number, 0 end
    local text = learned[flow] or redis.call('HGET', key.answers, flow)
    local most = settings.max_workloads
    if not text then
      if most and redis.call('HLEN', key.answers) + new_flows >= most then return end
      new_flows = new_flows + 1
    end
    local mean = text and parse_answer(text)
    mean = mean and settings.answer_alpha * tokens + (1 - settings.answer_alpha) * mean or tokens
    learned[flow] = struct.pack('dd', mean, now_ms)
    later('HSET', key.answers, flow, learned[flow])
  end
  function answers.drop(flow) later('HDEL', key.answers, flow) end
  function answers.idle(text, idle_ms)
    local mean, last_ms = parse_answer(text)
    return not mean or now_ms - last_ms > idle_ms
  end
end
