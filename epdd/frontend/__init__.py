"""The HTTP API and the chat page."""
