"""What every test shares."""

from hypothesis import HealthCheck, settings

# How fast examples come says something about the machine, not about the code.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")
