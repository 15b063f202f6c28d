"""``halfulp audit SCRIPT``: run an unmodified script, or every process under a command, with an audit."""
