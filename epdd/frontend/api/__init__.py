"""The endpoints, and the JSON of their answers."""
