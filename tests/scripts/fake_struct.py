"""Lua's `struct` for fakeredis, which lacks it: as much as the library uses. What it packs only it can read;
what comes packed from a replica ('<' in the format) it reads as everyone does."""

from picker_fleet.state.scripts import Library

_STRUCT = r"""
local struct = {}
function struct.pack(format, ...)
  local given, fields = {...}, {}
  for i = 1, #format do
    local kind, value = string.sub(format, i, i), given[i]
    if kind == 'B' then fields[i] = string.char(value)
    elseif kind == 's' then fields[i] = value .. '\31'
    else fields[i] = string.format('%.17g\31', value)
    end
  end
  return table.concat(fields)
end
local function double(text, at)
  local bytes = {string.byte(text, at, at + 7)}
  local exponent, mantissa = bytes[8] % 128 * 16 + math.floor(bytes[7] / 16), bytes[7] % 16
  for i = 6, 1, -1 do mantissa = mantissa * 256 + bytes[i] end
  local value = exponent == 0 and 0 or (mantissa / 2 ^ 52 + 1) * 2 ^ (exponent - 1023)
  return bytes[8] < 128 and value or -value
end
local function unpack_sent(format, text)
  local values, at = {}, 1
  for i = 2, #format do
    if string.sub(format, i, i) == 's' then
      local stop = string.find(text, '%z', at)
      values[i - 1] = string.sub(text, at, stop - 1)
      at = stop + 1
    else
      values[i - 1] = double(text, at)
      at = at + 8
    end
  end
  return unpack(values)
end
function struct.unpack(format, text, from)
  if string.sub(format, 1, 1) == '<' then return unpack_sent(format, text) end
  local values, at = {}, from or 1
  for i = 1, #format do
    local kind = string.sub(format, i, i)
    if kind == 'B' then
      values[i], at = string.byte(text, at), at + 1
    else
      local stop = string.find(text, '\31', at, true)
      local field = string.sub(text, at, stop - 1)
      values[i], at = kind == 's' and field or tonumber(field), stop + 1
    end
  end
  values[#format + 1] = at
  return unpack(values)
end
"""


def with_struct(library: Library) -> str:
    """The source of `library` with a `struct` of its own."""
    shebang, body = library.source.split("\n", 1)
    return f"{shebang}\n{_STRUCT}\n{body}"
