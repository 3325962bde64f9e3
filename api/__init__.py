"""The admin API: what speaks HTTP, and nothing else. It knows the store, and never touches the kernel."""
