"""Dry runs: the engine itself, on a machine that has neither data nor time of its own (`dry_run`)."""
