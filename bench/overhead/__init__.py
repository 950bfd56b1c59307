"""What the picker costs, measured beside a floor in the same run: `python -m bench.overhead`."""
