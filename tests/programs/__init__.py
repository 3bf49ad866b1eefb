"""Random training programs, run by the engine and by a plain reference of its documented rules."""
