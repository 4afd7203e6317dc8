"""All-reduce of a flat vector: shares and their owners, aggregation rules, and error feedback for lossy codecs."""
