"""What goes wrong in a testbed."""


class LabError(Exception):
    """The lab or the traffic in it could not be had; the text says what was asked and what was answered."""
