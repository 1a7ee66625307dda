"""The workers as the daemon sees them."""
