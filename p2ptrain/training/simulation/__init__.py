"""Training of many sites in one process, for trying strategies; see docs/how-to/simulate.md."""
