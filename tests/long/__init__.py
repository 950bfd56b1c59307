"""Checks of whole fleets that take minutes to hours, started by `make long`; pytest collects none of them."""
