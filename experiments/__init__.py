"""Measurements that run from a checkout; not installed."""
