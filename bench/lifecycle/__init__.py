"""What a request's life costs Redis, beside a script of three writes: `python -m bench.lifecycle`."""
