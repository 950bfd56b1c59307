"""What is gained by knowing how long endpoints take? `python -m bench.latency`."""
