"""Random training programs over ranks, and how they are drawn, run and compared."""
