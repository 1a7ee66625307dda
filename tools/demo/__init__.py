"""The demo model: its world, its training, its evaluation."""
