"""Where each node of mixed-precision training may live, and what each choice moves over the link."""
