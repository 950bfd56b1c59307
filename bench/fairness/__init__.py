"""Whether one queue for the whole fleet is fair, beside one queue a replica: `python -m bench.fairness`."""
