"""Everything outsiders speak to: the HTTP API and the admin socket."""
