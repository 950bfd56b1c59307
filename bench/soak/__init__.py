"""A long steady load on a whole fleet: does anything grow, does any count drift? `python -m bench.soak`."""
