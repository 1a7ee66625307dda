"""The image files of a request: where they are read, within which limits, and what their headers say."""
