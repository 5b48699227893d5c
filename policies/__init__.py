"""Residency policies, one file each."""
