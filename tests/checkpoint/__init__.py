"""Checks of a model folder without torch."""
