"""Benchmarks: each prints figures of one run, as medians and ratios, with the goal beside them."""
