"""Commands about indexes of public swarms."""
