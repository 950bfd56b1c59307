"""Envoy's listener for operators: the admin API and the dashboard of any ready replica, at one address.

A fleet whose replicas come and go has no other fixed address for them. Envoy checks nothing here: everyone
who reaches the listener may read, and changes need the replicas' own `admin.token` (docs/admin-api.md).
"""

from picker_tools.local_fleet.clusters import PICKER_ADMIN
from picker_tools.local_fleet.envoy_types import (
    OTHER_HOST_DRAWS,
    address,
    core_v3,
    hcm_v3,
    listener_v3,
    matcher_v3,
    packed,
    previous_hosts_v3,
    route_v3,
    router_v3,
    seconds,
)

NAME = "admin"
_SLOW_S = 15.0  # for a client to send a whole request, and between events, of which there is one a second
_IDLE_S = 120.0
_TRIES = 2
_NOT_SENT = "connect-failure,refused-stream,reset-before-request"


def admin_listener(listen: tuple[str, int]) -> listener_v3.Listener:
    """The listener at `listen` (host, port)."""
    manager = hcm_v3.HttpConnectionManager(
        stat_prefix=NAME,
        use_remote_address=True,  # adds x-forwarded-for, so that no replica takes a client for a local one
        request_headers_timeout=seconds(_SLOW_S),
        request_timeout=seconds(_SLOW_S),
        stream_idle_timeout=seconds(_SLOW_S),
        common_http_protocol_options=core_v3.HttpProtocolOptions(idle_timeout=seconds(_IDLE_S)),
        route_config=route_v3.RouteConfiguration(
            name=NAME,
            virtual_hosts=[
                route_v3.VirtualHost(
                    name=NAME,
                    domains=["*"],
                    # A read may be repeated; a change only if no replica has seen it.
                    routes=[_route(f"{_NOT_SENT},reset", method="GET"), _route(_NOT_SENT)],
                )
            ],
        ),
        http_filters=[
            hcm_v3.HttpFilter(name="envoy.filters.http.router", typed_config=packed(router_v3.Router()))
        ],
    )
    return listener_v3.Listener(
        name=NAME,
        address=address(*listen),
        filter_chains=[
            listener_v3.FilterChain(
                filters=[
                    listener_v3.Filter(
                        name="envoy.filters.network.http_connection_manager", typed_config=packed(manager)
                    )
                ]
            )
        ],
    )


def _route(retry_on: str, method: str | None = None) -> route_v3.Route:
    """Every path of `method` (None: of any) to a replica, another one where it fails as `retry_on` says."""
    match = route_v3.RouteMatch(prefix="/")
    if method is not None:
        exactly = matcher_v3.StringMatcher(exact=method)
        match.headers = [route_v3.HeaderMatcher(name=":method", string_match=exactly)]
    return route_v3.Route(
        match=match,
        route=route_v3.RouteAction(
            cluster=PICKER_ADMIN,
            timeout=seconds(0),  # events have no end; a replica's other answers have a deadline of their own
            retry_policy=route_v3.RetryPolicy(
                retry_on=retry_on,
                num_retries=_TRIES,
                retry_host_predicate=[
                    route_v3.RetryPolicyRetryHostPredicate(
                        name="envoy.retry_host_predicates.previous_hosts",
                        typed_config=packed(previous_hosts_v3.PreviousHostsPredicate()),
                    )
                ],
                host_selection_retry_max_attempts=OTHER_HOST_DRAWS,
            ),
        ),
    )
