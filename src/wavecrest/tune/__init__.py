"""`wavecrest tune OP`: the fastest correct backend and configuration for each shape key, by measurement.

A key goes through these modules:

- `candidates` lists the backends and configurations to try;
- `compile_ahead` compiles their kernels before anything is timed (`compile_worker` is its child process);
- `admission` admits the candidates that are correct, and rejects times that cannot be true;
- `race` times the admitted candidates and picks the winner;
- `trial` does all of this for one key, and `child` is the process it runs in;
- `workers` starts these processes, one per GPU; `pool` spreads keys over them and finds the candidate that ended a
  process;
- `session` plans the keys and writes the results after each.
"""
