"""Rehearse runs that do not happen on the updates of one that does, and compare them with outcomes."""
