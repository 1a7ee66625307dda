"""Checks that need a GPU, part by part."""
