"""Work that the fork server does before it forks fleets: imports, and one Envoy bootstrap (forked_up.py)."""

from picker_fleet import serve  # noqa: F401
from picker_fleet.domain.config import Settings
from picker_tools.local_fleet import bootstrap, up_command  # noqa: F401
from picker_tools.simulator import command  # noqa: F401

_NOWHERE = ("127.0.0.1", 0)
bootstrap.build_bootstrap(Settings(), mode="lean", listen=_NOWHERE, admin=_NOWHERE, pickers=[_NOWHERE])
