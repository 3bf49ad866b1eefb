"""Kernels any trainer can use alone."""
