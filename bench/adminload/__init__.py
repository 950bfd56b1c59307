"""What the admin API costs beside a long queue: `python -m bench.adminload`."""
