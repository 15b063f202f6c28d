"""Spend a byte budget of fp32 masters on the tiles that matter."""
