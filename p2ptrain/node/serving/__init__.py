"""A peer's part in generation: it serves what it holds, or asks others."""
