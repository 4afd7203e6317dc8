"""Requests, replies and channels between peers, on any transport."""
