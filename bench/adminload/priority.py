"""How a process of the dashboards stands among those of the fleet."""

import os


def take(priority: str) -> None:
    """A nice value, or `idle`: it runs while nobody else wants the core. ValueError: it is neither."""
    if priority == "idle":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(int(priority))
