"""Pure functions from peers' records to the views that terminals and the status page show."""
