"""`wavecrest tune OP`: the fastest correct backend and configuration for each shape key, by measurement.

`candidates` says what takes part, `ahead` compiles it before anything is timed (`worker` is its child process), `trust`
decides what may be timed and which times can be true, `contest` times and judges, `trial` does all that for one key;
`child` is the process that does so, `lanes` are the places where such processes run, `pool` spreads keys over them and
finds out who ended one; `session` plans the keys and writes what is found after each.
"""
