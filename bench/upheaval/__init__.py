"""A long run of everything at once, and the audit of its decision log: `python -m bench.upheaval`.

Replicas are killed and started, what they held is brought to others, clients leave, settings change, the
fleet is paused; the log of all of it must not show one broken promise.
"""
