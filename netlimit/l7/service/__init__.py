"""The limiter as a service: decisions over HTTP and gRPC, for proxies and programs that ask."""
