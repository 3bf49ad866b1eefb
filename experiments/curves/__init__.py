"""Training runs whose loss curves are compared: the runs, their records, and what is read from these.

`run` says what a run is, `trainer` trains it, `kept` knows where its files lie, `pool` trains many. Tasks are `gpt` and
`bert`. `analysis` and `report` read records only.
"""
