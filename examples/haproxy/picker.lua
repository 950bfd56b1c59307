-- The check of a request at a picker, and the report of its end (docs/proxies.md). Loaded by haproxy.cfg.

local PICKERS = 'unix@/run/haproxy-pickers.sock' -- the listener `pickers` of haproxy.cfg
local CHECK_S = 90 -- longer than fair_request_queue.queue_ttl
local SETTLE_S = 2
local SETTLE_TRIES = 3

local checks = {} -- by the id of its request, the socket of a check that is not answered yet

-- The answer to a request over `socket`: status, headers by lower-case name, body. Nil if it does not come whole. HAProxy's
-- own HTTP client does not tell a picker that a client has left.
local function exchange(socket, line, headers, timeout_s)
  socket:settimeout(timeout_s)
  if not socket:connect(PICKERS) then return end
  local lines = {line .. ' HTTP/1.1', 'host: pickers', 'content-length: 0', 'connection: close'}
  for name, value in pairs(headers) do
    lines[#lines + 1] = name .. ': ' .. tostring(value):gsub('%c', ' ')
  end
  if not socket:send(table.concat(lines, '\r\n') .. '\r\n\r\n') then return end
  local status = tonumber((socket:receive('*l') or ''):match('^HTTP/1%.1 (%d%d%d)'))
  local answer = {}
  while status do
    local text = (socket:receive('*l') or ''):gsub('\r$', '')
    if text == '' then break end
    local name, value = text:match('^([^:]+):%s*(.*)$')
    answer[name:lower()] = value
  end
  local length = tonumber(answer['content-length'])
  if not length then return end
  return status, answer, length > 0 and socket:receive(length) or ''
end

-- Ask a picker, and wait until the request is placed. Sets the variables by which haproxy.cfg sends it on.
core.register_action('picker_check', {'http-req'}, function(txn)
  local id = txn.f:unique_id()
  checks[id] = core.tcp()
  local status, headers, body = exchange(checks[id], 'GET /check', {
    ['x-forwarded-method'] = txn.f:method(),
    ['x-forwarded-uri'] = txn.f:pathq(),
    ['x-forwarded-for'] = txn.f:src(),
    ['x-request-id'] = id,
    ['x-picker-model'] = txn:get_var('txn.model'),
    ['x-picker-body-bytes'] = txn.sf:req_hdr('content-length'),
    ['x-gateway-inference-fairness-id'] = txn:get_var('txn.flow'),
    ['x-workload-context'] = txn.f:req_hdr('x-workload-context'),
    ['x-llm-d-inference-ttl'] = txn.f:req_hdr('x-llm-d-inference-ttl'),
  }, CHECK_S)
  checks[id]:close()
  checks[id] = nil
  local endpoint = status == 200 and headers['x-gateway-destination-endpoint']:match('^[^,]+')
  if not endpoint then
    local reply = txn:reply{status = status or 503, body = body or ''}
    for _, name in ipairs({'content-type', 'retry-after'}) do
      if headers and headers[name] then reply:add_header(name, headers[name]) end
    end
    txn:done(reply)
  end
  local host, port = endpoint:match('^%[?(.-)%]?:(%d+)$')
  txn:set_var('txn.picker_host', host)
  txn:set_var('txn.picker_port', tonumber(port))
  txn:set_var('txn.picker_endpoint', endpoint)
  txn:set_var('txn.picker_token', headers['x-picker-settle-token'])
end)

local function settle(headers)
  for _ = 1, SETTLE_TRIES do
    local socket = core.tcp()
    local status = exchange(socket, 'POST /settle', headers, SETTLE_S)
    socket:close()
    if status and status < 500 then return end
    core.msleep(200)
  end
end

-- What ends with a request, whoever ends it: its check, or its place.
local End = {flags = filter.FLT_CFG_FL_HTX}
End.__index = End

function End:new()
  return setmetatable({}, End)
end

function End:start_analyze(_, channel)
  filter.register_data_filter(self, channel)
end

function End:http_headers(_, message)
  if message.channel:is_resp() then self.status = tonumber(message:get_stline().code) end
  return filter.CONTINUE
end

function End:http_payload() end -- without it HAProxy 2.6 ends no analysis

function End:http_end(_, message)
  if message.channel:is_resp() then self.whole = true end
  return filter.CONTINUE
end

function End:end_analyze(txn, channel)
  if not channel:is_resp() then return end
  local id, token = txn.f:unique_id(), txn:get_var('txn.picker_token')
  if checks[id] then
    checks[id]:close()
    checks[id] = nil
  end
  if not token then return end
  local outcome = self.whole and 'completed' or 'client_gone'
  if (self.status or 0) >= 500 then outcome = 'upstream_failed' end
  local headers = {
    ['x-picker-settle-token'] = token,
    ['x-picker-outcome'] = outcome,
    ['x-picker-answer-status'] = self.status or 0,
    ['x-picker-served'] = txn:get_var('txn.picker_endpoint'),
  }
  core.register_task(function() settle(headers) end)
end

core.register_filter('picker_end', End, function(instance) return instance end)
