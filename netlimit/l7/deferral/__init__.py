"""Requests over a limit that are kept, answered 202, and replayed to the upstream at the permitted rate."""
