"""States that are spread over ranks: described, saved, read on any number of ranks, and made whole."""
