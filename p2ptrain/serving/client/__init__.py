"""The client's side: routes, and one generation's session."""
