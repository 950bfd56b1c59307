"""Checks of whole fleets that take minutes to hours. `make long` runs them; pytest does not collect them."""
