"""One file a step, each with the way back."""
