"""What a developer and a gateway's root run; the modules here are shared by those scripts and the tests."""
