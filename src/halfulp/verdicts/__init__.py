"""Turn a trace into an answer: what was lost, where, what it costs and what to do."""
