"""The chat page at `/`: its files, the pictures of its examples, and the fleet's figures."""

from epdd.frontend.chat_page.routes import add

__all__ = ["add"]
