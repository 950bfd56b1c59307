-- Envoy's Lua filter in the modes `lean` and `http`: reads token usage, ids and errors in the answers of model servers,
-- for the access log (accesslog.py). The filter passes each chunk of an answer on at once and unchanged. A server may
-- send anything: the work grows linearly with the bytes, and at most LONGEST bytes are kept between two chunks.
--
-- bootstrap.py puts EVENTS and ANSWER before this text: the keys to read in the JSON of each event of a stream and of a
-- whole answer, nested like the JSON, with their keys in the metadata. The filter reads only keys at exactly these
-- places: a client could make a server repeat such a key elsewhere.

local LONGEST = 512 -- maximum bytes of a key with its value

local byte, find, sub = string.byte, string.find, string.sub
local QUOTE, BACKSLASH, COLON = byte('"'), byte("\\"), byte(":")
local OPEN, CLOSE, OPEN_LIST, CLOSE_LIST = byte("{"), byte("}"), byte("["), byte("]")
local LINE_FEED, RETURN = byte("\n"), byte("\r")

-- Returns the position of the first byte from `at` on that is not white space, and this byte; nil at the text's end.
local function skip_blanks(text, at)
  local char = byte(text, at)
  while char == 32 or char and char >= 9 and char <= 13 do
    at = at + 1
    char = byte(text, at)
  end
  return at, char
end

-- Reads the string at `at` in an object that has keys to read, and its value if the string is such a key. Returns the
-- position where reading continues, or nil if key or value continue in the next chunk, and whether this position is
-- within a string.
local function read_key(answer, text, at)
  local stop = find(text, '"', at + 1, true)
  local next, char = skip_blanks(text, stop and stop + 1 or #text + 1)
  if not char and #text - at < LONGEST then
    return nil, false
  end
  if char ~= COLON or byte(text, stop - 1) == BACKSLASH then -- this string is not a key to read
    return at + 1, true
  end
  local object = answer.nodes[answer.known]
  local name = object[sub(text, at + 1, stop - 1)]
  if not name then
    return next + 1, false
  end
  local value
  value, char = skip_blanks(text, next + 1)
  local is_text = char == QUOTE
  local last = find(text, is_text and '"' or "[%[{,}%s]", is_text and value + 1 or value)
  if not last then -- the value continues in the next chunk, or is too long to be kept
    return #text - at >= LONGEST and next + 1 or nil, false
  end
  local found = sub(text, value, last - 1)
  if type(name) == "table" then
    if char == OPEN then
      answer.depth, answer.known = answer.depth + 1, answer.known + 1
      answer.nodes[answer.known] = name
      answer.found.error = answer.found.error or name == object.error
      return value + 1, false
    end
  elseif not is_text then
    answer.found[name] = find(found, "^-?%d[%d.eE+-]*$") and tonumber(found)
  elseif find(name, "_id$") and find(found, '^"[%w._:-]*$') then
    answer.found[name] = sub(found, 2)
  end
  return value, false
end

-- Reads the next part of an answer, which is a JSON object or a stream of events with an object each. At the end of
-- each object, calls `keep` with the keys found in it. `depth` objects and lists are open; the outermost `known` of
-- them are objects with keys to read (`nodes`).
local function read(answer, text, keep)
  text = answer.cut .. text
  -- Most bytes are read only to find where something ends: keep the state in local variables, for speed.
  local at, size = 1, #text
  local depth, known, in_string, is_escaped = answer.depth, answer.known, answer.in_string, answer.is_escaped
  answer.cut = ""
  if depth == 0 and not in_string then -- skip the event's name and `data:` at once
    at = find(text, '["{%[]') or size + 1
  end
  while at <= size do
    local char = byte(text, at)
    if in_string then
      -- Find the next quote, which an odd number of backslashes escapes.
      local stop = find(text, '"', at, true) or size + 1
      local first = stop
      while first > at and byte(text, first - 1) == BACKSLASH do
        first = first - 1
      end
      is_escaped = (stop - first) % 2 == ((first == at and is_escaped) and 0 or 1)
      in_string = is_escaped or stop > size
      is_escaped = is_escaped and stop > size
      at = stop
    elseif char == QUOTE then
      in_string = true
      if known > 0 and depth == known then
        local next
        answer.depth, answer.known = depth, known
        next, in_string = read_key(answer, text, at)
        if not next then
          answer.cut = sub(text, at)
          break
        end
        depth, known, at = answer.depth, answer.known, next - 1
      end
    elseif char == OPEN or char == OPEN_LIST then
      depth = depth + 1
      if depth == 1 and char == OPEN then
        known = 1
      end
    elseif (char == CLOSE or char == CLOSE_LIST) and depth > 0 then
      depth = depth - 1
      if known > depth then
        known = depth
      end
      if depth == 0 then
        keep(answer.found)
        answer.found = {}
      end
    end
    at = at + 1
  end
  answer.depth, answer.known, answer.in_string, answer.is_escaped = depth, known, in_string, is_escaped
end

-- Reads the next part of a stream of events, as `read` does. An event's blank line, which no JSON string can contain,
-- also ends the event's JSON, so that a damaged event, or a comment with a quote or a bracket, hides no other event.
local function read_events(answer, text, keep)
  local at, stop = 1, answer.line_ended and 0 or find(text, "\n", 1, true)
  while stop do
    local next = byte(text, stop + 1)
    stop = stop + 1
    if next == LINE_FEED or next == RETURN then
      read(answer, sub(text, at, stop), keep)
      if answer.depth > 0 or answer.in_string then
        answer.depth, answer.known, answer.in_string, answer.is_escaped, answer.cut = 0, 0, false, false, ""
      end
      at = stop + 1
    end
    stop = find(text, "\n", stop, true)
  end
  answer.line_ended = byte(text, -1) == LINE_FEED
  if at <= #text then
    read(answer, sub(text, at), keep)
  end
end

function envoy_on_response(handle)
  local headers = handle:headers()
  local kind = string.match((headers:get("content-type") or ""):lower(), "^%s*([^;%s]*)")
  local keys = ({ ["text/event-stream"] = EVENTS, ["application/json"] = ANSWER })[kind]
  local encoding = (headers:get("content-encoding") or ""):lower()
  if not keys or encoding ~= "" and encoding ~= "identity" then
    return
  end
  local function keep(found)
    for name, value in pairs(found) do
      if value then
        handle:streamInfo():dynamicMetadata():set("picker.usage", name, value)
      end
    end
  end
  local answer = { nodes = { keys }, depth = 0, known = 0, cut = "", found = {} }
  local read_part = keys == EVENTS and read_events or read
  for chunk in handle:bodyChunks() do
    if chunk:length() > 0 then
      read_part(answer, chunk:getBytes(0, chunk:length()), keep)
    end
  end
end
