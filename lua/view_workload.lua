-- include: view
-- One workload of the registry. Reads only.
--
-- keys[1] epp:{POOL}:pool
-- args[1] workload id
-- Returns {now_us, row}, as view_workloads has it; {now_us} if there is none
local function view_workload(args)
  local text = redis.call('HGET', key.workloads, args[1])
  return {full(now_us), text and view.workload(args[1], text) or nil}
end
