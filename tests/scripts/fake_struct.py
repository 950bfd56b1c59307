"""Lua's `struct` for fakeredis, which lacks it: as much as the library uses, readable only by itself."""

from app.state.scripts import Library

_STRUCT = r"""
local struct = {}
function struct.pack(format, ...)
  local fields = {...}
  for i = 1, #format do
    if string.sub(format, i, i) ~= 's' then fields[i] = string.format('%.17g', fields[i]) end
  end
  return table.concat(fields, '\31') .. '\31'
end
function struct.unpack(format, text)
  local values, at = {}, 1
  for i = 1, #format do
    local stop = string.find(text, '\31', at, true)
    local field = string.sub(text, at, stop - 1)
    values[i] = string.sub(format, i, i) == 's' and field or tonumber(field)
    at = stop + 1
  end
  return unpack(values)
end
"""


def with_struct(library: Library) -> str:
    """The source of `library` with a `struct` of its own."""
    shebang, body = library.source.split("\n", 1)
    return f"{shebang}\n{_STRUCT}\n{body}"
