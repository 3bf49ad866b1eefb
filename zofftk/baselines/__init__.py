"""Systems that the paper compares with, as schedules on the virtual device (`predict`)."""
