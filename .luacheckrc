-- Checked as assembled (every piece in its place); a piece may offer more than one script needs.
std = "lua51"
read_globals = {"redis", "KEYS", "ARGV", "cjson"}
max_line_length = 120
ignore = {"211", "241"}
