"""Counters in this process's memory: one module an algorithm, and the store that keeps one counter a rule."""
