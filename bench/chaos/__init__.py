"""A long run in which everything fails and changes at once, audited."""
