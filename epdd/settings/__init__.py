"""All settings, and command lines that set them."""
