"""Benchmarks: measured rows as JSON lines."""
