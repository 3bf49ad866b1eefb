"""One rank, or many that share the states of one model (ZeRO-2)."""
