"""What `scripts/soak` runs: changes and faults over a real kernel, and many writers at one database."""
