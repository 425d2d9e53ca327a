"""Which backend runs a call: ops, backends, decisions, and the measured rows they rest on."""
