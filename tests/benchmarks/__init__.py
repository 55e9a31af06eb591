"""Measurements; run one with ``python -m tests.benchmarks.NAME``."""
