"""Placement: which page is where, who holds it, and what moves next."""
