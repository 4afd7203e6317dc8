"""Pipeline parallelism: partition of a model into stages, routing of microbatches, and placement of hosts."""
