"""Operators with a plain-PyTorch definition, one file each."""
