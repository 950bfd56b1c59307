-- Checked as assembled: one library, every piece in its place.
std = "lua51"
read_globals = {"redis", "cjson", "struct"}
max_line_length = 120
ignore = {"211", "241"}
files["**/usage.lua"] = {globals = {"envoy_on_response"}, read_globals = {"EVENTS", "ANSWER"}}
