"""The chat page at `/`: its files, the pictures of its examples, and the figures it shows of the fleet."""

from epdd.frontend.chat_page.routes import add

__all__ = ["add"]
