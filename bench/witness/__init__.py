"""Clients that remember every request they made, and the check of their memory against the fleet's log."""
