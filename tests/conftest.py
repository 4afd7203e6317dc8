"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, and nothing about the property.
settings.register_profile("p2ptrain", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("p2ptrain")
