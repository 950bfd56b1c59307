"""Do replicas that pick at the same moment pick the same endpoint? `python -m bench.herding`."""
