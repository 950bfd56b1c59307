"""Replaces Lua's `struct`, which fakeredis lacks, with the functions that the library uses. The functions
pack in a format of their own, but read data that replicas packed ('<' in the format) as `struct` does."""

from dataclasses import replace

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
function struct.unpack(format, text, from)
  local sent = string.sub(format, 1, 1) == '<'
  local kinds, ends_with = sent and string.sub(format, 2) or format, sent and '%z' or '\31'
  local values, at = {}, from or 1
  for i = 1, #kinds do
    local kind = string.sub(kinds, i, i)
    if kind == 'B' then
      values[i], at = string.byte(text, at), at + 1
    elseif sent and kind == 'd' then
      values[i], at = double(text, at), at + 8
    else
      local stop = string.find(text, ends_with, at)
      local field = string.sub(text, at, stop - 1)
      values[i], at = kind == 's' and field or tonumber(field), stop + 1
    end
  end
  values[#kinds + 1] = at
  return unpack(values)
end
"""


def with_struct(library: Library) -> Library:
    """The library `library` with its own `struct`."""
    shebang, body = library.source.split("\n", 1)
    return replace(library, source=f"{shebang}\n{_STRUCT}\n{body}")
