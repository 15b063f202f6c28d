"""Take the rows of a step: the trace on disk or in memory, the newest step in few numbers, alerts."""
