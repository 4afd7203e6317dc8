"""A stage host: its stage, its passes, its microbatches and its rounds."""
