"""The demo model: the world it answers about, its training, its marks."""
