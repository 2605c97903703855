"""Ratios against verl and TRL, in one process. ``make bench`` sets everything up and runs ``python -m benchmarks``."""
