"""Replaces the clock of lua/lib/pool.lua by one that a key of Redis sets."""

_CLOCK = """
-- %s
local now_us, now_ms
local clock_shift_ms = 0
local function steady_clock()
  now_us = tonumber(redis.call('GET', '%s') or 1700000000000000)
  now_ms = math.floor(now_us / 1000)
end
local function advance_clock() end
local function clock_change() end
"""


def clock_of(key: str, name: str = "") -> str:
    """By `key`, in microseconds. Libraries whose clocks have different names are different."""
    return _CLOCK % (name, key)
