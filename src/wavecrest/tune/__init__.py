"""`wavecrest tune OP`: the fastest correct backend and configuration for each shape key, by measurement.

A key goes through these modules:

- `candidates` lists the backends and configurations to try;
- `ahead` compiles their kernels before anything is timed (`worker` is its child process);
- `trust` admits the candidates that are correct, and rejects times that cannot be true;
- `contest` times the admitted candidates and picks the winner;
- `trial` does all of this for one key, and `child` is the process it runs in;
- `lanes` are the places (one per GPU) where such processes run; `pool` spreads keys over them and finds the candidate
  that ended a process;
- `session` plans the keys and writes the results after each.
"""
