"""Pure functions that turn peers' records into views for terminals and the status page."""
