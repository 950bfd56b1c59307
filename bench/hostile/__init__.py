"""All attacks of docs/security.md at once on a whole fleet, with honest clients beside them."""
