"""netlimit: who may send or receive how much, kept by the Linux kernel."""
