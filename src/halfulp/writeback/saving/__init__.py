"""Save and load the state of a write-back, as a dictionary or a file, or from a plain optimizer's state."""
