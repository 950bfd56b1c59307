"""Does a fleet of several replicas cost cache hits? `python -m bench.prefix`."""
