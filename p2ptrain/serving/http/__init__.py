"""An HTTP server with OpenAI's API over a generator, and a page to chat with."""
