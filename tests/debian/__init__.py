"""What needs a kernel with all that Debian's has: run by scripts/vm, and not part of scripts/test."""
