"""One request's way through the daemon: admission, encoder cache, queue, router, pipeline."""
