"""Pure policies: plain data and a time in, a decision out; no I/O, no clock."""
