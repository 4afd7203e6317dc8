"""Which text and which samples a peer reads."""
