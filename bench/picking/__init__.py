"""What choosing endpoints costs a replica, and how it grows with their number: `python -m bench.picking`."""
