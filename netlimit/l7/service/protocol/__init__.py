"""Envoy's rate limit protocol: what netlimit speaks of it, and the modules that `scripts/protocol` makes of that."""
