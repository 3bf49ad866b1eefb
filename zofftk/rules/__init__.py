"""One file for each optimizer that can run on the host: its states, its hyper-parameters, its update."""
