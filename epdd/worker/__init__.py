"""Inside a worker process: only here may torch be imported."""
