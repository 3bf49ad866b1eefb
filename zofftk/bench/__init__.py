"""Benchmarks behind ``zofftk bench``."""
