"""What lies in a model folder, looked at without torch."""
