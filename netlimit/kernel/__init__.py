"""The only part that touches Linux."""
