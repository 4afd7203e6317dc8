"""What holds for all tests."""

import signal

from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, and nothing about the property.
settings.register_profile("p2ptrain", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("p2ptrain")

# A shell without job control has its background jobs ignore SIGINT, which they pass on: no child could be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
