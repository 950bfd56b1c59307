"""Work that the fork server does before it forks fleets: imports, and one Envoy bootstrap (forked_up.py)."""

import gc

gc.disable()  # a garbage collection during the imports, or in a fork, would scan everything loaded here

import pydantic.v1  # noqa: E402, F401 - FastAPI imports it for its first route

from picker_fleet import serve  # noqa: E402, F401
from picker_fleet.domain.config import Settings  # noqa: E402
from picker_tools.local_fleet import bootstrap, up_command  # noqa: E402, F401
from picker_tools.simulator import command  # noqa: E402, F401

_NOWHERE = ("127.0.0.1", 0)
bootstrap.build_bootstrap(Settings(), mode="lean", listen=_NOWHERE, admin=_NOWHERE, pickers=[_NOWHERE])
gc.freeze()
gc.enable()
