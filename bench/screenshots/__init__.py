"""Pictures of the dashboard and of `picker top` for the documentation, of a real fleet under load."""
