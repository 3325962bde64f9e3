"""What scripts/install has put on a machine that systemd has booted: run by `scripts/vm --systemd`, and not part of
scripts/test."""
