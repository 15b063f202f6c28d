"""Make steps in one pass, which reads and writes gradient, moments and weights once."""
