"""The L7 limiter: rules as data, counters in memory or Redis, decisions for applications and proxies."""
