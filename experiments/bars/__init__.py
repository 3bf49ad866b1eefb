"""The bars of the paper's throughput figures: which step each one is, and its prediction."""
