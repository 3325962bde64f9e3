"""The command line. It puts the parts together, and only it and `api.app` do."""
