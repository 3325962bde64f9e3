"""Packets that try to pass: what they are, how they are sent and counted, and the page that tells of them."""
