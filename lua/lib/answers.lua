-- include: pool
-- What a flow's answers cost on average, in tokens: the estimate for a request that sets no maximum.
local answers = {}
function answers.mean(flow)
  local text = redis.call('HGET', key.answers, flow)
  return text and struct.unpack('d', text) or settings.default_answer
end
function answers.learn(flow, tokens)
  local text = redis.call('HGET', key.answers, flow)
  local most = settings.max_workloads
  if not text and most and redis.call('HLEN', key.answers) >= most then return end
  local mean = text and struct.unpack('d', text)
  mean = mean and settings.answer_alpha * tokens + (1 - settings.answer_alpha) * mean or tokens
  redis.call('HSET', key.answers, flow, struct.pack('dd', mean, now_ms))
end
function answers.drop(flow) redis.call('HDEL', key.answers, flow) end
function answers.idle(text, idle_ms)
  local _, last_ms = struct.unpack('dd', text)
  return now_ms - last_ms > idle_ms
end
