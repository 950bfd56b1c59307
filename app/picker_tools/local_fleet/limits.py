"""What Envoy bears at most from its clients as a whole: connections, and memory (its overload manager)."""

from picker_tools.local_fleet.envoy_types import (
    DownstreamConnectionsConfig,
    FixedHeapConfig,
    OverloadAction,
    OverloadManager,
    ResourceMonitor,
    ThresholdTrigger,
    Trigger,
    packed,
    seconds,
)

_HEAP = "envoy.resource_monitors.fixed_heap"
_CONNECTIONS = "envoy.resource_monitors.global_downstream_max_connections"
# As a share of the heap allowed: give back what is free, answer 503, accept nothing.
_ACTIONS = {"shrink_heap": 0.9, "stop_accepting_requests": 0.95, "stop_accepting_connections": 0.98}


def overload_manager(*, max_connections: int, max_heap_bytes: int) -> OverloadManager:
    """At most `max_connections` of clients, further ones are closed; at most about `max_heap_bytes`."""
    connections = DownstreamConnectionsConfig(max_active_downstream_connections=max_connections)
    heap = FixedHeapConfig(max_heap_size_bytes=max_heap_bytes)
    return OverloadManager(
        refresh_interval=seconds(0.25),
        resource_monitors=[
            ResourceMonitor(name=_HEAP, typed_config=packed(heap)),
            ResourceMonitor(name=_CONNECTIONS, typed_config=packed(connections)),
        ],
        actions=[
            OverloadAction(
                name=f"envoy.overload_actions.{action}",
                triggers=[Trigger(name=_HEAP, threshold=ThresholdTrigger(value=share))],
            )
            for action, share in _ACTIONS.items()
        ],
    )
