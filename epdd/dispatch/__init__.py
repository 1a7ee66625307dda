"""One request's way: admission, queue, router, leases, pipeline."""
