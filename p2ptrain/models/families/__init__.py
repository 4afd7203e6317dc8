"""The model families, and stages of each."""
