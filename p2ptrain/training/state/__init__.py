"""The state that the holders of one certificate share, bit for bit."""
