"""Pilots: really run a little of a training, and know what each number format would cost in loss."""
