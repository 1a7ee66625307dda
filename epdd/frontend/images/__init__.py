"""The image files of a request: reading within limits, formats, and sizes from headers."""
