"""Bridges to inference engines, one package an engine."""
