"""Counters in Redis, shared by every process that asks the same server or cluster."""
