"""HTTP below the endpoints: connections, bodies, keys, errors as answers, event streams."""
